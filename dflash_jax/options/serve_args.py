"""The command line of `python -m dflash_jax.serve`, checked: what every part of the server is told."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import yaml

from dflash_jax.base.errors import ConfigError
from dflash_jax.options import EngineArgs
from dflash_jax.options.flag_values import Number, json_object
from dflash_jax.options.serve_flags import Parser, build_parser
from dflash_jax.weights.folder import alias_drafter

SERVER_ENGINE = EngineArgs(compile_at_start=None, max_num_queued_seqs=4096)
EMBEDDED_NAME = "dflash-embedded"  # what requests call the embedded pair
FLAG = re.compile(r"-[^\d\s][^\s]*")  # what argparse would never take as a value


@dataclass(frozen=True)
class Limits:
    """What the server lets a client do.

    Attributes:
        max_request_body_bytes: of one request.
        max_header_bytes: of one request, all headers together.
        request_header_timeout: seconds until the headers are there.
        request_body_timeout: seconds until the body is there.
        request_timeout: seconds from arrival to the last token; None bounds nothing.
        max_concurrent_requests: HTTP connections at a time.
        max_n: completions of one prompt.
        max_prompts: prompts of one completion request.
        max_stop_strings: of one request.
        max_logprobs: alternatives of one token.
    """

    max_request_body_bytes: int = 16 * 1024**2
    max_header_bytes: int = 64 * 1024
    request_header_timeout: float = 10.0
    request_body_timeout: float = 60.0
    request_timeout: float | None = None
    max_concurrent_requests: int = 8192
    max_n: int = 64
    max_prompts: int = 1024
    max_stop_strings: int = 16
    max_logprobs: int = 20


@dataclass(frozen=True)
class ServeArgs:
    """What the server is told; without arguments, what no flag at all means.

    Attributes:
        model: folder or Hub id of the target; None is the embedded pair.
        draft_model: the same of the drafter; None is the embedded pair's, or none.
        engine: the engine's options; accelerators compile every step at start, and the queue is bounded.
        served_model_name: names of the model in requests; answers have the first.
        host: address to listen on.
        port: TCP port to listen on; 0 takes a free one.
        uds: path of a Unix socket to listen on instead.
        root_path: what a proxy strips from the paths of URLs; begins with a slash and ends without one, or is empty.
        api_keys: any of them lets a request in; none lets in all.
        ssl_keyfile: PEM file of the certificate's key; None if the certificate's file has it.
        ssl_certfile: PEM file of the server's certificate; None is plain HTTP.
        ssl_ca_certs: PEM file of the authorities of client certificates.
        ssl_cert_reqs: client certificates as `ssl.CERT_*`: 0 asks for none, 1 takes them, 2 requires them.
        allowed_origins: origins of pages that browsers may call from; none turns CORS off.
        allowed_methods: HTTP methods of such pages.
        allowed_headers: HTTP headers of such pages.
        allow_credentials: whether such pages may send cookies and HTTP authentication.
        chat_template: the text of the Jinja template; None takes the model's.
        default_chat_template_kwargs: variables of the template, where a request gives none.
        reasoning_parser: a name of `REASONING_PARSERS`; None leaves reasoning in the content.
        tool_call_parser: a name of `TOOL_PARSERS`; None leaves calls in the content.
        enable_auto_tool_choice: whether the model may choose to call tools.
        generation_config: whose generation_config.json gives sampling defaults: "auto" the model's, "vllm" nobody's,
            otherwise that of this folder.
        override_generation_config: sampling defaults that come before those.
        limits: what a client may do.
        shutdown_timeout: seconds that running requests have to end after SIGTERM; 0 aborts them at once.
        restart_engine: whether an engine process that has died is started again.
        sse_keep_alive_interval: seconds without news after which a stream gets a comment; 0 sends none.
        stream_interval: least tokens of a stream's chunk, but for the last.
        enable_request_id_headers: whether answers have the header X-Request-Id.
        enable_prompt_tokens_details: whether usage tells how much of a prompt was cached.
        enable_force_include_usage: whether every stream ends with usage.
        per_request_spec_decode_metrics: what answers tell of their speculation.
        metrics_prefix: what the names in /metrics begin with.
        log_level: least level that is logged.
        disable_log_stats: whether throughput and acceptance are not logged.
        log_stats_interval: seconds between these lines.
        enable_log_requests: whether each request is logged.
        max_log_len: characters, or token ids, of a prompt that are logged; None logs all.
        enable_docs: whether the OpenAPI schema and its pages are served.
        profile_dir: folder of traces; None turns profiling off.
    """

    model: str | None = None
    draft_model: str | None = None
    engine: EngineArgs = SERVER_ENGINE
    served_model_name: tuple[str, ...] = (EMBEDDED_NAME,)
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    chat_template: str | None = None
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    limits: Limits = Limits()
    shutdown_timeout: float = 30.0
    restart_engine: bool = False
    sse_keep_alive_interval: float = 15.0
    stream_interval: int = 1
    enable_request_id_headers: bool = False
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = "summary"
    metrics_prefix: str = "dflash_jax:"
    log_level: str = "info"
    disable_log_stats: bool = False
    log_stats_interval: float = 10.0
    enable_log_requests: bool = False
    max_log_len: int | None = None
    enable_docs: bool = True
    profile_dir: str | None = None


# A flag, another that it needs, and what that is.
NEEDS = (
    ("ssl_keyfile", "ssl_certfile", "the certificate of the key"),
    ("ssl_ca_certs", "ssl_certfile", "the server's own certificate"),
    ("ssl_ca_certs", "ssl_cert_reqs", "1 or 2, without which no client is checked"),
    ("ssl_cert_reqs", "ssl_ca_certs", "the authorities that are trusted"),
    ("allow_credentials", "allowed_origins", "the pages that may send them"),
    ("allowed_methods", "allowed_origins", "the pages that may use them"),
    ("allowed_headers", "allowed_origins", "the pages that may send them"),
    ("enable_auto_tool_choice", "tool_call_parser", "the format of calls"),
)

# Flags of vLLM and SGLang that are left out on purpose: why, and what to do instead.
ABSENT = {
    name: reason
    for line, reason in {
        "trust-remote-code": "no code is taken from a model folder; leave it out",
        "tokenizer tokenizer-path tokenizer-mode skip-tokenizer-init": "the tokenizer is that of the model folder; "
        "put another one's files there",
        "revision code-revision tokenizer-revision": "a Hub id means its newest revision; download another and "
        "give its folder",
        "download-dir": "the Hub's files are kept where HF_HOME says; set that instead",
        "load-format": "weights are safetensors; convert others first",
        "quantization q": "the checkpoint's config.json says how it is quantised; leave it out",
        "hf-overrides rope-scaling rope-theta json-model-override-args": "the model is what its config.json says; edit "
        "a copy of that",
        "enforce-eager compilation-config cc O optimization-level cudagraph-capture-sizes disable-cuda-graph "
        "cuda-graph-max-bs enable-torch-compile": "XLA compiles every step; leave it out, or start sooner with "
        "--no-compile-at-start",
        "attention-backend attention-config mm-attention-backend sampling-backend speculative-attention-mode": "the "
        "device decides which kernels run; leave it out",
        "swap-space cpu-offload-gb kv-offloading-size kv-transfer-config": "nothing is moved to the host's memory; "
        "lower --max-model-len or --max-num-seqs if the device's is short",
        "num-gpu-blocks-override max-total-tokens": "the KV cache is sized in bytes; give --kv-cache-memory-bytes",
        "data-parallel-size dp dp-size": "a server is one replica; start several and put a router before them",
        "pipeline-parallel-size pp pp-size": "layers are not spread over devices; share them with "
        "--tensor-parallel-size",
        "enable-expert-parallel ep ep-size": "there are no experts in the models that are served; leave it out",
        "nnodes node-rank master-addr master-port dist-init-addr distributed-executor-backend": "a server uses the "
        "devices of one host; leave it out",
        "device": "JAX takes the accelerator that it finds; set JAX_PLATFORMS to choose",
        "enable-lora lora-modules lora-paths max-loras max-lora-rank": "adapters are not served; merge them into the "
        "weights",
        "limit-mm-per-prompt mm-processor-kwargs": "only text is served; leave it out",
        "runner task convert is-embedding": "only text generation is served; leave it out",
        "middleware tool-parser-plugin reasoning-parser-plugin logits-processors worker-cls": "no code is loaded by "
        "name; leave it out",
        "structured-outputs-config guided-decoding-backend grammar-backend": "structured outputs are llguidance's; "
        "leave it out",
        "enable-chunked-prefill": "prompts are always processed in chunks; give their size as --max-num-batched-tokens",
        "async-scheduling enable-overlap-schedule disable-overlap-schedule": "the host is always one round behind; "
        "leave it out",
        "scheduling-policy schedule-policy": "requests are served as they come; leave it out",
        "speculative-num-steps speculative-eagle-topk speculative-dflash-block-size": "a drafter drafts its whole "
        "block in one pass; give --num-speculative-tokens to verify less of it",
        "preferred-sampling-params": "sampling defaults are vLLM's flag here; give --override-generation-config",
        "disable-log-requests disable-uvicorn-access-log": "requests are logged only with --enable-log-requests; leave "
        "it out",
        "uvicorn-log-level log-level-http": "one level is for all; give --log-level",
        "enable-metrics": "/metrics is always served; leave it out",
        "profiler-config": "traces are jax.profiler's; give --profile-dir",
        "otlp-traces-endpoint": "no traces are exported; read /metrics, or profile with --profile-dir",
        "h11-max-incomplete-event-size h11-max-header-count": "headers are bounded in bytes; give --max-header-bytes",
        "ssl-ciphers enable-ssl-refresh": "TLS is Python's default; put a proxy in front for more",
    }.items()
    for name in line.split()
}


def parse_args(arguments: list[str] | None = None) -> ServeArgs:
    """What the arguments say, by default those of the process.

    Raises:
        SystemExit: with status 2, after one sentence, if an argument is unknown, impossible or contradicts another;
            with status 0 after `--help`.
    """
    defaults = {f.name: getattr(part, f.name) for part in _parts(ServeArgs()) for f in fields(part)}
    parser = build_parser(defaults | {"spec_method": None, "config": None})
    try:
        given = _given(parser, sys.argv[1:] if arguments is None else arguments)
        path = given.pop("config", None)
        return _build(given if path is None else _from_file(parser, path) | given)
    except ConfigError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def _parts(args: ServeArgs) -> tuple[ServeArgs, EngineArgs, Limits]:
    return args, args.engine, args.limits


def _given(parser: Parser, arguments: Iterable[str]) -> dict[str, Any]:
    """The fields that arguments set, by name."""
    arguments = [_dashed(argument) for argument in arguments]
    for argument in takewhile(lambda a: a != "--", arguments):
        name = argument.partition("=")[0]
        if FLAG.fullmatch(name) and name not in (*parser.flags, "-h", "--help"):
            raise _unknown(name, parser.flags)
    namespace, rest = parser.parse_known_args(arguments)
    if rest:
        raise ConfigError(f"{rest[0]!r} is one argument too many; give one model, and flags.")
    return vars(namespace)


def _dashed(argument: str) -> str:
    """A flag with dashes: vLLM's may have underscores."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if FLAG.fullmatch(name) else argument


def _unknown(name: str, known: Iterable[str]) -> ConfigError:
    """The refusal of a flag, or of a key of a file."""
    reason = ABSENT.get(name.lstrip("-").removeprefix("no-"))
    if reason is not None:
        return ConfigError(f"{name} is not supported: {reason}.")
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return ConfigError(f"there is no {name}; did you mean {nearest}?")


def _from_file(parser: Parser, path: str) -> dict[str, Any]:
    """The fields that a YAML file sets, by name: its keys are flags."""
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(f"--config={path!r} cannot be read ({reason}); give a file of YAML.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must be a mapping of flags to values such as 'port: 8000'.")
    known = [flag.removeprefix("--") for flag in parser.flags if flag.startswith("--") and flag != "--config"]
    arguments: list[str] = []
    try:
        for key, value in config.items():
            name = str(key).replace("_", "-")
            if name not in known:
                raise _unknown(name, known)
            arguments += _arguments(parser, name, value)
        return _given(parser, arguments)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _arguments(parser: Parser, name: str, value: Any) -> list[str]:
    """A key of a file and its value, as on the command line."""
    action = parser.flags[f"--{name}"]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r} must be true or false.")
        opposite = [f"--no-{name}"] if f"--no-{name}" in parser.flags else []
        return [f"--{name}"] if value else opposite
    is_list = isinstance(value, list) and isinstance(parser.defaults[action.dest], tuple)
    texts = []
    for item in value if is_list else [value]:
        if isinstance(item, Mapping) and action.type is json_object:
            texts.append(json.dumps(item, default=str))
        elif isinstance(item, str) or (isinstance(action.type, Number) and type(item) in (int, float)):
            texts.append(str(item))
        else:
            found = "empty" if item is None else f"of type {type(item).__name__}"  # its value may be a secret
            takes = action.metavar or " | ".join(action.choices or ())
            raise ConfigError(f"{name} is {found}, but takes {takes}; put text in quotes, or leave the key out.")
    return [f"--{name}={text}" for text in texts]


def _build(given: dict[str, Any]) -> ServeArgs:
    """The fields that were given, and the defaults of the others.

    Raises:
        ConfigError: they cannot go together.
    """
    _check(given)
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    serve, engine, limits = (
        {f.name: given[f.name] for f in fields(part) if f.name in given} for part in _parts(ServeArgs())
    )
    if "model" in serve:
        serve = {"served_model_name": (serve["model"],)} | serve
    return ServeArgs(**serve, engine=replace(SERVER_ENGINE, **engine), limits=Limits(**limits))


def _check(given: Mapping[str, Any]) -> None:
    """Refuse what cannot go together."""
    used = {name for name, value in given.items() if value}
    for name, needed, reason in NEEDS:
        if name in used and needed not in used:
            raise ConfigError(f"{_flag(name)} needs {_flag(needed)}, {reason}; give both or neither.")
    if "allow_credentials" in used and "*" in given["allowed_origins"]:
        raise ConfigError("--allow-credentials does not go with --allowed-origins=*; name the origins.")
    if "uds" in used and {"host", "port"} & given.keys():
        raise ConfigError("--uds does not go with --host or --port; keep the one or the others.")
    drafts = sorted({"spec_method", "num_speculative_tokens", "draft_kv_cache_dtype", "draft_quantization"} & used)
    if drafts and "model" in used and "draft_model" not in used and alias_drafter(given["model"]) is None:
        raise ConfigError(f"{_flag(drafts[0])} needs a drafter; give --draft-model, or leave it out.")


def _flag(name: str) -> str:
    """The flag that sets a field."""
    return "--" + name.replace("_", "-")
