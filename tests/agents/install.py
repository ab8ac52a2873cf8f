"""`python -m tests.agents.install FOLDER`: the agents and SDKs of agents.json, in a folder of their own."""

import json
import subprocess
import sys
from pathlib import Path

PINNED = json.loads((Path(__file__).parent / "agents.json").read_text())


def main(folder: Path) -> None:
    """Install what is pinned, unless the folder has it already."""
    done = folder / "installed.json"
    if done.exists() and json.loads(done.read_text()) == PINNED:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text(json.dumps({"private": True, "dependencies": PINNED["npm"]}))
    # Nothing that a package brings runs before the tests do: the binaries lie in packages of their own.
    subprocess.run(["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=folder, check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    wanted = [f"{name}=={version}" for name, version in PINNED["pip"].items()]
    subprocess.run([str(folder / "venv/bin/python"), "-m", "pip", "install", "--quiet", *wanted], check=True)
    done.write_text(json.dumps(PINNED))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
