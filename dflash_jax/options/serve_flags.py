"""The flags of `python -m dflash_jax.serve`: their names, units and defaults.

A flag's destination is the field that it sets, and its default is that field's: the parser returns only what was given.
Names are vLLM's; SGLang's are other names of the same flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from dflash_jax.base.errors import ConfigError
from dflash_jax.base.values import MOST_COMPLETIONS, MOST_LOGPROBS, is_int
from dflash_jax.options import flag_values as values
from dflash_jax.options.engine_config import DRAFT_QUANTIZATIONS, DTYPES, KV_CACHE_DTYPES
from dflash_jax.options.flag_values import Number
from dflash_jax.text.parsing import REASONING_PARSERS, TOOL_PARSERS

STORED_DTYPES = ("auto", *KV_CACHE_DTYPES)
SIZE, SIZE_OR_NONE, SIZE_OR_ZERO = Number(1), Number(1, or_none=True), Number(0)
SECONDS, SECONDS_OR_ZERO = Number(0, is_whole=False, is_open=True), Number(0, is_whole=False)
SECONDS_OR_NONE = Number(0, is_whole=False, is_open=True, or_none=True)
SWITCH = argparse.BooleanOptionalAction

Add = Callable[..., None]


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError, in one sentence, where argparse would print and leave.

    Attributes:
        defaults: of the fields that flags set, by name.
        flags: what each flag does, by each of its names.
    """

    def __init__(self, defaults: Mapping[str, Any]):
        super().__init__(
            prog="python -m dflash_jax.serve",
            usage="%(prog)s [MODEL] [flags]",
            description="Serve a model with DFlash speculative decoding over OpenAI's API. Integers may end in k, m, g "
            "or t (powers of 1000) or K, M, G or T (powers of 1024).",
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        self.defaults = defaults
        self.flags: dict[str, argparse.Action] = {}

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}.")


def build_parser(defaults: Mapping[str, Any]) -> Parser:
    """The parser of all flags; `defaults` are those of the fields that they set."""
    parser = Parser(defaults)
    for title, declare in GROUPS.items():
        declare(partial(_add, parser, parser.add_argument_group(title)))
    return parser


def _add(
    parser: Parser, group: argparse._ArgumentGroup, *names: str, help: str, unset: str = "", **options: Any
) -> None:
    """Add a flag. `unset` says what happens without it, where the field's default does not."""
    action = group.add_argument(*names, **options)
    words = unset or _shown(parser.defaults[action.dest])
    action.help = f"{help} (default: {words})".replace("%", "%%")
    parser.flags |= dict.fromkeys(action.option_strings, action)


def _shown(default: Any) -> str:
    """A default as `--help` shows it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, int | float):
        return f"{default:g}" if isinstance(default, float) else str(default)
    return (" ".join(default) if isinstance(default, tuple) else str(default or "")) or "none"


class Agreed(argparse.Action):
    """Stores a value, and refuses another than was given before: several flags mean the same thing."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        self.put(namespace, self.dest, value)

    def put(self, namespace: argparse.Namespace, dest: str, value: Any) -> None:
        """Set a field; raises argparse.ArgumentError if it is set to something else."""
        before = getattr(namespace, dest, value)
        if before != value:
            reason = f"means {dest}={value!r}, but {before!r} was given before; keep one of them"
            raise argparse.ArgumentError(self, reason)
        setattr(namespace, dest, value)


# The keys of vLLM's JSON: the field that each sets, what it must be, in words and as a test.
SPECULATIVE_KEYS: dict[str, tuple[str, str, Callable[[Any], bool]]] = {
    "method": ("spec_method", "'dflash'", lambda v: v == "dflash"),
    "model": ("draft_model", "a folder or a Hub id", lambda v: isinstance(v, str) and bool(v.strip())),
    "num_speculative_tokens": ("num_speculative_tokens", "an integer of at least 1", lambda v: is_int(v) and v >= 1),
    "kv_cache_dtype": ("draft_kv_cache_dtype", f"one of {', '.join(STORED_DTYPES)}", lambda v: v in STORED_DTYPES),
    "quantization": (
        "draft_quantization",
        f"one of {', '.join(DRAFT_QUANTIZATIONS)}",
        lambda v: v in DRAFT_QUANTIZATIONS,
    ),
}


class SpeculativeConfig(Agreed):
    """Stores the keys of vLLM's JSON as the fields they mean."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        for key, given in value.items():
            if key not in SPECULATIVE_KEYS:
                known = ", ".join(SPECULATIVE_KEYS)
                raise argparse.ArgumentError(
                    self, f"the key {key!r} is not supported; leave it out (there are {known})"
                )
            dest, words, holds = SPECULATIVE_KEYS[key]
            if not holds(given):
                raise argparse.ArgumentError(self, f"{key}={given!r} must be {words}")
            self.put(namespace, dest, given)


def _model(add: Add) -> None:
    text = {"type": values.plain_text, "action": Agreed, "metavar": "MODEL"}
    add("model", **text, nargs="?", help="the same as --model", unset="the embedded pair")
    what = "folder or Hugging Face Hub id of a Qwen3 or Llama model"
    add("--model", "--model-path", **text, help=what, unset="the embedded pair")
    add(
        "--served-model-name",
        type=values.plain_text,
        nargs="+",
        action="extend",
        metavar="NAME",
        help="names that requests may call the model by; answers have the first",
        unset="the model as given, dflash-embedded for the embedded pair",
    )
    add(
        "--generation-config",
        type=values.generation_config,
        metavar="auto|vllm|FOLDER",
        help="whose generation_config.json gives the sampling defaults: the model's, nobody's (vllm) or a folder's",
    )
    add(
        "--override-generation-config",
        type=values.json_object,
        metavar="JSON",
        help="sampling defaults that come before those of generation_config.json",
    )
    add(
        "--chat-template",
        type=values.template,
        metavar="FILE|TEXT",
        help="Jinja chat template: a file, or the template itself",
        unset="the model's",
    )
    add(
        "--default-chat-template-kwargs",
        type=values.json_object,
        metavar="JSON",
        help='variables of the chat template, where a request gives none, such as {"enable_thinking": false}',
    )


def _speculation(add: Add) -> None:
    add(
        "--speculative-config",
        type=values.json_object,
        action=SpeculativeConfig,
        metavar="JSON",
        help=f"vLLM's object of {', '.join(SPECULATIVE_KEYS)}",
        unset="none",
    )
    add(
        "--draft-model",
        "--spec-model",
        "--speculative-draft-model-path",
        type=values.plain_text,
        action=Agreed,
        metavar="MODEL",
        help="folder or Hub id of the target's DFlash drafter",
        unset="the embedded pair's, or none: one token a pass",
    )
    add(
        "--num-speculative-tokens",
        "--spec-tokens",
        type=SIZE_OR_NONE,
        action=Agreed,
        metavar="N",
        help="drafts that every round verifies, at most the drafter's block_size - 1",
        unset="none: each round verifies as many as pay",
    )
    add(
        "--speculative-num-draft-tokens",
        type=values.drafts_of_block,
        action=Agreed,
        dest="num_speculative_tokens",
        metavar="N",
        help="SGLang's count of the same in tokens: one more, for the target's own",
        unset="as many as pay",
    )
    method = {"type": values.dflash, "dest": "spec_method", "metavar": "dflash"}
    add("--spec-method", "--speculative-algorithm", **method, help="the method of speculation", unset="dflash")
    add(
        "--draft-kv-cache-dtype",
        action=Agreed,
        choices=STORED_DTYPES,
        help="type of the drafter's stored keys and values; auto takes --kv-cache-dtype",
    )
    add(
        "--draft-quantization",
        "--speculative-draft-model-quantization",
        action=Agreed,
        choices=DRAFT_QUANTIZATIONS,
        help="type of the drafter's matrix products; changes no output",
        unset="none: --dtype",
    )


def _engine(add: Add) -> None:
    add("--dtype", choices=("auto", *DTYPES), help="what to compute in; auto: the checkpoint's, float32 on CPUs")
    add("--kv-cache-dtype", choices=STORED_DTYPES, help="type of stored keys and values; auto takes --dtype")
    length = "most tokens of prompt and completion"
    add(
        "--max-model-len",
        "--context-length",
        type=SIZE_OR_NONE,
        metavar="TOKENS",
        help=length,
        unset="the model's most",
    )
    sequences = {"metavar": "SEQUENCES"}
    add("--max-num-seqs", "--max-running-requests", type=SIZE, **sequences, help="most sequences that run side by side")
    add(
        "--max-num-queued-reqs",
        "--max-queued-requests",
        type=SIZE_OR_NONE,
        dest="max_num_queued_seqs",
        **sequences,
        help="most sequences (n of each request) that wait; none bounds nothing",
    )
    chunk = "most prompt tokens processed in one step, over all sequences"
    add("--max-num-batched-tokens", "--chunked-prefill-size", type=SIZE, metavar="TOKENS", help=chunk)
    devices = "devices that share the model"
    add("--tensor-parallel-size", "-tp", "--tp-size", "--tp", type=SIZE, metavar="DEVICES", help=devices)
    pages = {"type": SIZE, "dest": "page_size", "metavar": "TOKENS"}
    add("--block-size", "--page-size", **pages, help="tokens of a page of the KV cache")
    add("--enable-prefix-caching", action=SWITCH, help="keep the pages of past prompts for prompts that begin alike")
    off = {"action": "store_false", "dest": "enable_prefix_caching"}
    add("--disable-radix-cache", **off, help="the same as --no-enable-prefix-caching", unset="prefix caching is on")
    share = Number(0, 1, is_whole=False, is_open=True)
    memory = "share of the device's memory for parameters and KV cache, above 0 and at most 1"
    add("--gpu-memory-utilization", "--mem-fraction-static", type=share, metavar="SHARE", help=memory)
    add(
        "--kv-cache-memory-bytes",
        type=SIZE_OR_NONE,
        metavar="BYTES",
        help="memory for the KV cache of all devices together, instead of the share",
        unset="none: what the share leaves",
    )
    at_start = "compile every step before the first request, not when first needed"
    add("--compile-at-start", action=SWITCH, help=at_start, unset="on, but off on CPUs")
    seed = Number(-(2**63), 2**63 - 1, or_none=True)
    random = "of the seeds drawn for requests that bring none; none makes every run differ"
    add("--seed", "--random-seed", type=seed, metavar="N", help=random)


def _server(add: Add) -> None:
    file = "YAML file of flags by name, dashes or underscores; the command line wins over it"
    add("--config", metavar="FILE", help=file, unset="none")
    add("--host", type=values.plain_text, metavar="ADDRESS", help="address to listen on; 0.0.0.0 is every one of IPv4")
    add("--port", type=Number(0, 65535), metavar="PORT", help="TCP port to listen on; 0 takes a free one")
    add("--uds", type=values.socket_path, metavar="PATH", help="Unix socket to listen on instead")
    prefix = "path that a proxy in front strips from URLs, such as /llm"
    add("--root-path", "--fastapi-root-path", type=values.root_path, metavar="PATH", help=prefix)
    drain = "seconds that running requests have to end after SIGTERM; 0 aborts them at once"
    add("--shutdown-timeout", type=SECONDS_OR_ZERO, metavar="SECONDS", help=drain)
    add("--restart-engine", action=SWITCH, help="start the engine process again after it has died")
    docs = {"action": "store_false", "dest": "enable_docs"}
    add("--disable-fastapi-docs", **docs, help="serve no OpenAPI schema and no pages of it", unset="they are served")


def _security(add: Add) -> None:
    keys = {"dest": "api_keys"}
    key = "key that requests must bring; may be repeated, and any of them will do"
    add("--api-key", type=values.api_key, action="append", **keys, metavar="KEY", help=key, unset="none: open to all")
    lines = "file of such keys, one a line, without blank lines and # comments"
    add("--api-key-file", type=values.api_keys, action="extend", **keys, metavar="FILE", help=lines, unset="none")
    path = {"type": values.readable_file, "metavar": "FILE"}
    add("--ssl-certfile", **path, help="PEM file of the server's certificate, and of its key unless given apart")
    add("--ssl-keyfile", **path, help="PEM file of the certificate's key")
    add("--ssl-ca-certs", **path, help="PEM file of the authorities whose client certificates are trusted")
    asked = "client certificates: 0 asks for none, 1 takes them, 2 requires them"
    add("--ssl-cert-reqs", type=Number(0, 2), metavar="0|1|2", help=asked)
    listed = {"type": values.names, "action": "extend"}
    origins = "origin of pages that browsers may call from, or a JSON list; may be repeated, * is any; turns CORS on"
    add("--allowed-origins", **listed, metavar="ORIGIN", help=origins)
    add("--allowed-methods", **listed, metavar="METHOD", help="HTTP method that such pages may use; as the origins")
    add("--allowed-headers", **listed, metavar="HEADER", help="HTTP header that such pages may send; as the origins")
    add("--allow-credentials", action=SWITCH, help="let such pages send cookies and HTTP authentication")


def _limits(add: Add) -> None:
    size, seconds = {"type": SIZE, "metavar": "BYTES"}, {"type": SECONDS, "metavar": "SECONDS"}
    add("--max-request-body-bytes", **size, help="most bytes of a request's body")
    add("--max-header-bytes", **size, help="most bytes of a request's headers together")
    add("--request-header-timeout", **seconds, help="seconds that a client has to send its headers")
    add("--request-body-timeout", **seconds, help="seconds that a client has to send its body")
    add(
        "--request-timeout",
        type=SECONDS_OR_NONE,
        metavar="SECONDS",
        help="seconds that a request may take from arrival to its last token; then it is aborted",
        unset="none: as long as it takes",
    )
    count = {"type": SIZE, "metavar": "N"}
    add("--max-concurrent-requests", **count, help="most HTTP connections at a time")
    add("--max-n", type=Number(1, MOST_COMPLETIONS), metavar="N", help="most completions of a prompt (a request's n)")
    add("--max-prompts", **count, help="most prompts of one completion request")
    add("--max-stop-strings", type=SIZE_OR_ZERO, metavar="N", help="most stop strings of a request")
    top = f"most alternatives whose log-probabilities a request may ask for, up to {MOST_LOGPROBS}"
    add("--max-logprobs", type=Number(0, MOST_LOGPROBS), metavar="N", help=top)


def _answers(add: Add) -> None:
    parser = {"type": values.parser_name}
    reasoning = "takes reasoning out of the content; qwen3-thinking is another name"
    add("--reasoning-parser", **parser, choices=REASONING_PARSERS, help=reasoning)
    calls = "takes tool calls out of the content; qwen and qwen25 are other names of hermes"
    add("--tool-call-parser", **parser, choices=TOOL_PARSERS, help=calls)
    add("--enable-auto-tool-choice", action=SWITCH, help="let the model choose to call tools; needs --tool-call-parser")
    chunk = "least tokens of a chunk of a stream, but for the last"
    add("--stream-interval", type=SIZE, metavar="TOKENS", help=chunk)
    alive = (
        "seconds without news after which a stream gets a comment, which keeps proxies from closing it; 0 sends none"
    )
    add("--sse-keep-alive-interval", type=SECONDS_OR_ZERO, metavar="SECONDS", help=alive)
    add("--enable-request-id-headers", action=SWITCH, help="answer with the header X-Request-Id")
    cached = "tell in usage how much of a prompt was cached"
    add("--enable-prompt-tokens-details", "--enable-cache-report", action=SWITCH, help=cached)
    add("--enable-force-include-usage", action=SWITCH, help="send usage in streams that did not ask for it")
    levels = ("none", "summary", "detailed")
    spec = "what answers tell of their speculation; detailed has every round"
    add("--per-request-spec-decode-metrics", choices=levels, help=spec)


def _logging(add: Add) -> None:
    add("--log-level", choices=("debug", "info", "warning", "error", "critical"), help="least level that is logged")
    add("--enable-log-requests", "--log-requests", action=SWITCH, help="log each request as it comes")
    most = "most characters, or token ids, of a prompt that are logged; none logs all"
    add("--max-log-len", type=Number(0, or_none=True), metavar="N", help=most)
    add("--disable-log-stats", action=SWITCH, help="log no throughput and no acceptance")
    add("--log-stats-interval", type=SECONDS, metavar="SECONDS", help="seconds between the lines that log them")
    prefix = "what names of /metrics begin with; vllm: suits vLLM's dashboards"
    add("--metrics-prefix", type=values.metrics_prefix, metavar="PREFIX", help=prefix)
    trace = "folder for the traces of /start_profile"
    add("--profile-dir", type=values.folder, metavar="FOLDER", help=trace, unset="none: no profiling")


GROUPS: dict[str, Callable[[Add], None]] = {
    "model": _model,
    "speculation": _speculation,
    "engine": _engine,
    "server": _server,
    "security": _security,
    "limits": _limits,
    "answers": _answers,
    "logging": _logging,
}
