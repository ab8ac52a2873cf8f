"""The options of the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_jax.base.values import MOST_COMPLETIONS, MOST_LOGPROBS
from dflash_jax.options import flag_values as values
from dflash_jax.options.engine_args import ENGINE, SPECULATION, EngineArgs
from dflash_jax.options.kinds import Choice, Number, Read, Switch, Text
from dflash_jax.options.option import Flag, described, documented, option

SERVER_ENGINE = EngineArgs(compile_at_start=None, max_num_queued_seqs=4096)
EMBEDDED_NAME = "dflash-embedded"  # the embedded pair's name in requests
# Names of `dflash_jax.text.parsing`, which this room does not import; a test compares them.
REASONING_PARSERS = ("qwen3", "none")
TOOL_PARSERS = ("hermes", "qwen3_json", "qwen3_coder", "qwen3_xml", "none")

MODEL, SERVER, SECURITY, LIMITS, ANSWERS, LOGGING = "model", "server", "security", "limits", "answers", "logging"
GROUPS = (MODEL, SPECULATION, ENGINE, SERVER, SECURITY, LIMITS, ANSWERS, LOGGING)  # as `--help` orders them

COUNT, COUNT_OR_ZERO = Number(1), Number(0)
SECONDS, SECONDS_OR_ZERO = Number(0, is_whole=False, is_open=True), Number(0, is_whole=False)
SECONDS_OR_NONE = Number(0, is_whole=False, is_open=True, or_none=True)
PEM = Read(values.readable_file, or_none=True)
MODEL_NAME = Text("a folder or a Hub id", or_none=True)


@documented
@dataclass(frozen=True)
class Limits:
    """What the server lets a client do."""

    max_request_body_bytes: int = option(
        16 * 1024**2, COUNT, "most bytes of a request's body", unit="BYTES", server_group=LIMITS
    )
    max_header_bytes: int = option(
        64 * 1024, COUNT, "most bytes of a request's headers together", unit="BYTES", server_group=LIMITS
    )
    request_header_timeout: float = option(
        10.0, SECONDS, "seconds that a client has to send its headers", unit="SECONDS", server_group=LIMITS
    )
    request_body_timeout: float = option(
        60.0, SECONDS, "seconds that a client has to send its body", unit="SECONDS", server_group=LIMITS
    )
    request_timeout: float | None = option(
        None,
        SECONDS_OR_NONE,
        "seconds that a request may take from arrival to its last token; then it is aborted",
        unit="SECONDS",
        unset="none: as long as it takes",
        server_group=LIMITS,
    )
    max_concurrent_requests: int = option(8192, COUNT, "most HTTP connections at a time", unit="N", server_group=LIMITS)
    max_n: int = option(
        64,
        Number(1, MOST_COMPLETIONS),
        "most completions of a prompt (a request's n)",
        unit="N",
        server_group=LIMITS,
    )
    max_prompts: int = option(1024, COUNT, "most prompts of one completion request", unit="N", server_group=LIMITS)
    max_stop_strings: int = option(16, COUNT_OR_ZERO, "most stop strings of a request", unit="N", server_group=LIMITS)
    max_logprobs: int = option(
        20,
        Number(0, MOST_LOGPROBS),
        f"most alternatives of a token whose log-probabilities a request may ask for, up to {MOST_LOGPROBS}",
        unit="N",
        server_group=LIMITS,
    )


@documented
@dataclass(frozen=True)
class ServeArgs:
    """Options of the server. `ServeArgs()` is the command without flags.

    `engine` holds the engine's options (by default accelerators compile every program at start, and the queue is
    bounded), `limits` those that bound requests.
    """

    model: str | None = option(
        None,
        MODEL_NAME,
        "folder or Hugging Face Hub id of a Qwen3, Qwen3.5 or Llama model; embedded or embedded-hybrid, which ship "
        "with the package; or smollm2, which scripts/get_smollm2.py fetches",
        unit="MODEL",
        unset="the embedded pair",
        server_group=MODEL,
        server_names=("--model", "--model-path"),
        must_agree=True,
        server_flags=(
            Flag(
                ("model",),
                "another way to give --model",
                unset="the embedded pair",
                arguments={**Text().strict_flag(), "nargs": "?", "metavar": "MODEL"},
            ),
        ),
    )
    draft_model: str | None = option(
        None,
        MODEL_NAME,
        "folder or Hugging Face Hub id of the model's DFlash drafter",
        unit="MODEL",
        unset="the one that ships for the model, or none: one token a pass",
        server_group=SPECULATION,
        server_names=("--draft-model", "--spec-model", "--speculative-draft-model-path"),
        must_agree=True,
        speculative_key="model",
    )
    spec_method: str | None = option(
        None,
        Choice(("dflash",), or_none=True),
        "method of speculation; only dflash is supported",
        compare=False,
        unit="dflash",
        unset="dflash, if there is a drafter",
        server_group=SPECULATION,
        server_names=("--spec-method", "--speculative-algorithm"),
        server_arguments={"type": values.dflash, "choices": None},
        must_agree=True,
        speculative_key="method",
    )
    engine: EngineArgs = SERVER_ENGINE
    served_model_name: tuple[str, ...] = option(
        (EMBEDDED_NAME,),
        Text(),
        "names of the model in requests; answers have the first",
        unit="NAME",
        unset=f"the model as given, {EMBEDDED_NAME} for the embedded pair",
        server_group=MODEL,
        server_arguments={"action": "extend"},
        nargs="+",
    )
    generation_config: str = option(
        "auto",
        Read(values.generation_config),
        "whose generation_config.json gives the sampling defaults: the model's (auto), nobody's (vllm) or a folder's",
        unit="auto|vllm|FOLDER",
        server_group=MODEL,
    )
    override_generation_config: dict[str, Any] = field(
        default_factory=dict,
        metadata=described(
            Read(values.json_object),
            "sampling defaults that come before those of generation_config.json",
            unit="JSON",
            server_group=MODEL,
        ),
    )
    chat_template: str | None = option(
        None,
        Read(values.template, or_none=True),
        "Jinja chat template: a file, or the template itself",
        unit="FILE|TEXT",
        unset="the model's",
        server_group=MODEL,
    )
    default_chat_template_kwargs: dict[str, Any] = field(
        default_factory=dict,
        metadata=described(
            Read(values.json_object),
            'variables of the chat template, where a request gives none, such as {"enable_thinking": false}',
            unit="JSON",
            server_group=MODEL,
        ),
    )
    host: str = option(
        "127.0.0.1",
        Text(),
        "address to listen on; 0.0.0.0 is every IPv4 address of the machine",
        unit="ADDRESS",
        server_group=SERVER,
    )
    port: int = option(
        8000, Number(0, 65535), "TCP port to listen on; 0 takes a free one", unit="PORT", server_group=SERVER
    )
    uds: str | None = option(
        None,
        Read(values.socket_path, or_none=True),
        "Unix socket to listen on instead of a TCP port",
        unit="PATH",
        server_group=SERVER,
    )
    root_path: str = option(
        "",
        Read(values.root_path),
        "path that a proxy in front strips from URLs, such as /llm",
        unit="PATH",
        server_group=SERVER,
        server_names=("--root-path", "--fastapi-root-path"),
    )
    shutdown_timeout: float = option(
        30.0,
        SECONDS_OR_ZERO,
        "seconds that running requests have to end after SIGTERM; 0 aborts them at once",
        unit="SECONDS",
        server_group=SERVER,
    )
    restart_engine: bool = option(
        False, Switch(), "start the engine process again after it has died", server_group=SERVER
    )
    enable_docs: bool = option(
        True,
        Switch("store_false"),
        "leave out the OpenAPI schema and its pages",
        unset="they are served",
        server_group=SERVER,
        server_names=("--disable-fastapi-docs",),
    )
    api_keys: tuple[str, ...] = option(
        (),
        Read(values.api_key),
        "key that requests must bring; may be repeated, and each key is accepted",
        repr=False,
        unit="KEY",
        unset="none: open to all",
        server_group=SECURITY,
        server_names=("--api-key",),
        server_arguments={"action": "append"},
        server_flags=(
            Flag(
                ("--api-key-file",),
                "file of such keys, one a line; blank lines and # comments are skipped",
                unset="none",
                arguments={"type": values.api_keys, "action": "extend", "metavar": "FILE"},
            ),
        ),
    )
    ssl_certfile: str | None = option(
        None,
        PEM,
        "PEM file of the server's certificate, and of its key unless --ssl-keyfile is given",
        unit="FILE",
        unset="none: plain HTTP",
        server_group=SECURITY,
    )
    ssl_keyfile: str | None = option(None, PEM, "PEM file of the certificate's key", unit="FILE", server_group=SECURITY)
    ssl_ca_certs: str | None = option(
        None,
        PEM,
        "PEM file of the authorities whose client certificates are trusted",
        unit="FILE",
        server_group=SECURITY,
    )
    ssl_cert_reqs: int = option(
        0,
        Number(0, 2),
        "client certificates: 0 asks for none, 1 accepts them, 2 requires them",
        unit="0|1|2",
        server_group=SECURITY,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        Read(values.names),
        "origin of pages that browsers may call from, or a JSON list; may be repeated, * is any; turns CORS on",
        unit="ORIGIN",
        server_group=SECURITY,
        server_arguments={"action": "extend"},
    )
    allowed_methods: tuple[str, ...] = option(
        ("*",),
        Read(values.names),
        "HTTP method that such pages may use, or a JSON list; may be repeated",
        unit="METHOD",
        server_group=SECURITY,
        server_arguments={"action": "extend"},
    )
    allowed_headers: tuple[str, ...] = option(
        ("*",),
        Read(values.names),
        "HTTP header that such pages may send, or a JSON list; may be repeated",
        unit="HEADER",
        server_group=SECURITY,
        server_arguments={"action": "extend"},
    )
    allow_credentials: bool = option(
        False, Switch(), "let such pages send cookies and HTTP authentication", server_group=SECURITY
    )
    limits: Limits = Limits()
    reasoning_parser: str | None = option(
        None,
        Choice(REASONING_PARSERS, read=values.parser_name, or_none=True),
        "takes reasoning out of the content; qwen3-thinking is another name of qwen3, and none leaves it there",
        unset="by the chat template",
        server_group=ANSWERS,
    )
    tool_call_parser: str | None = option(
        None,
        Choice(TOOL_PARSERS, read=values.parser_name, or_none=True),
        "takes tool calls out of the content; qwen and qwen25 are other names of hermes, and none leaves them there",
        unset="by the chat template",
        server_group=ANSWERS,
    )
    enable_auto_tool_choice: bool = option(
        False,
        Switch(),
        "accepted for vLLM's command lines, without effect: the model may choose to call tools wherever a parser reads "
        "calls; --tool-call-parser none turns that off",
        server_group=ANSWERS,
    )
    stream_interval: int = option(
        1, COUNT, "least tokens of a chunk of a stream, except for the last", unit="TOKENS", server_group=ANSWERS
    )
    sse_keep_alive_interval: float = option(
        15.0,
        SECONDS_OR_ZERO,
        "seconds without news after which a stream gets a comment, which keeps proxies from closing it; 0 sends none",
        unit="SECONDS",
        server_group=ANSWERS,
    )
    enable_request_id_headers: bool = option(
        False, Switch(), "answer with the header X-Request-Id", server_group=ANSWERS
    )
    enable_prompt_tokens_details: bool = option(
        True,
        Switch(),
        "say in usage how many tokens of a prompt were cached",
        server_group=ANSWERS,
        server_names=("--enable-prompt-tokens-details", "--enable-cache-report"),
    )
    enable_force_include_usage: bool = option(
        False, Switch(), "send usage in streams that did not ask for it", server_group=ANSWERS
    )
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = option(
        "summary",
        Choice(("none", "summary", "detailed")),
        "what answers say of their speculation; detailed has every round",
        server_group=ANSWERS,
    )
    log_level: str = option(
        "info",
        Choice(("debug", "info", "warning", "error", "critical")),
        "lowest level that is logged",
        server_group=LOGGING,
    )
    enable_log_requests: bool = option(
        False,
        Switch(),
        "log each request as it comes",
        server_group=LOGGING,
        server_names=("--enable-log-requests", "--log-requests"),
    )
    max_log_len: int | None = option(
        None,
        Number(0, or_none=True),
        "most characters, or token ids, of a prompt that are logged; none logs all",
        unit="N",
        server_group=LOGGING,
    )
    disable_log_stats: bool = option(False, Switch(), "log no throughput and no acceptance", server_group=LOGGING)
    log_stats_interval: float = option(
        10.0,
        SECONDS,
        "seconds between the lines that log throughput and acceptance",
        unit="SECONDS",
        server_group=LOGGING,
    )
    metrics_prefix: str = option(
        "dflash_jax:",
        Read(values.metrics_prefix),
        "what names of /metrics begin with; vllm: suits vLLM's dashboards",
        unit="PREFIX",
        server_group=LOGGING,
    )
    profile_dir: str | None = option(
        None,
        Read(values.folder, or_none=True),
        "folder for the traces of /start_profile",
        unit="FOLDER",
        unset="none: no profiling",
        server_group=LOGGING,
    )


PARTS = (ServeArgs, EngineArgs, Limits)
