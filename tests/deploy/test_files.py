"""What operators start the server with is accepted by the server, and its parts fit together."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from dflash_jax.engine.device.budget import WAYS
from dflash_jax.options.serve_command import read_args

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OBJECTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
BY_NAME = {(entry["kind"], entry["metadata"]["name"]): entry for entry in OBJECTS}
SERVERS, GATEWAY = BY_NAME["StatefulSet", "dflash-server"], BY_NAME["Deployment", "dflash-gateway"]
POD = SERVERS["spec"]["template"]["spec"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
ENTRYPOINT = json.loads(re.search(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)[1])


def test_the_image_has_what_it_copies_and_starts_the_server():
    sources = [source for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) for source in line.split()[1:-1]]
    assert {"dflash_jax", "pallas_kernels", "pyproject.toml"} <= {*sources}
    assert all((ROOT / source).exists() for source in sources)
    assert ENTRYPOINT[:3] == ["python", "-m", "dflash_jax.serve"]


def test_pods_have_time_to_drain_and_start_with_flags_that_there_are():
    (container,) = POD["containers"]
    args = read_args([*ENTRYPOINT[3:], *container["args"]])
    sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["terminationGracePeriodSeconds"] > args.shutdown_timeout + sleep
    assert container["ports"] == [{"name": "http", "containerPort": args.port}]
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= set(
        re.findall(r"^VOLUME (.*)$", DOCKERFILE, re.M)
    )


def test_services_find_their_pods_and_the_gateway_its_servers():
    for (kind, name), service in BY_NAME.items():
        if kind == "Service":
            wanted = service["spec"]["selector"].items()
            pods = [other["spec"]["template"] for other in (SERVERS, GATEWAY)]
            assert sum(wanted <= pod["metadata"]["labels"].items() for pod in pods) == 1, name
    (gateway,) = GATEWAY["spec"]["template"]["spec"]["containers"]
    home = SERVERS["spec"]["serviceName"]
    urls = [f"http://dflash-server-{i}.{home}:8000" for i in range(SERVERS["spec"]["replicas"])]
    assert re.findall(r"http://\S+", gateway["args"][0]) == urls
    assert ("Service", home) in BY_NAME


def test_kubernetes_knows_every_field():
    command = shutil.which("kubernetes-validate")
    if command is None:
        pytest.skip("needs kubernetes-validate")
    subprocess.run([command, "--strict", "--quiet", str(DEPLOY / "kubernetes.yaml")], check=True)


def test_rays_configuration_starts_with_flags_that_there_are():
    (app,) = yaml.safe_load((DEPLOY / "ray_serve.yaml").read_text())["applications"]
    args = read_args(app["args"]["flags"])
    (server,) = app["deployments"]
    sequences = args.engine.max_num_seqs or WAYS[0][0]  # what an engine with enough memory runs side by side
    assert server["max_ongoing_requests"] > sequences
    for path in (
        app["import_path"],
        server["autoscaling_config"]["policy"]["policy_function"],
        server["request_router_config"]["request_router_class"],
    ):
        module, name = re.fullmatch(r"(deploy\.\w+)[:.](\w+)", path).groups()
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert re.search(rf"^(def|class) {name}\b", source, re.MULTILINE), path
