"""Helpers of the tests of the command line."""

from dataclasses import fields

import pytest

from dflash_jax.options import EngineArgs
from dflash_jax.options.serve_args import Limits, ServeArgs, parse_args
from dflash_jax.options.serve_flags import build_parser

SPEC = (
    '{"method": "dflash", "model": "d", "num_speculative_tokens": 15, "kv_cache_dtype": "fp8", "quantization": "fp8"}'
)
PARTS = {f.name: part for part in (ServeArgs, EngineArgs, Limits) for f in fields(part)}
TLS = ["--ssl-certfile", "cert.pem"]
CORS = ["--allowed-origins", "https://a"]


def parser():
    return build_parser(dict.fromkeys([*PARTS, "spec_method", "config"]))


def value(args: ServeArgs, name: str):
    part = {ServeArgs: args, EngineArgs: args.engine, Limits: args.limits}[PARTS[name]]
    return getattr(part, name)


def refusal(capsys, arguments) -> str:
    """The sentence that refuses the arguments."""
    with pytest.raises(SystemExit) as exit_info:
        parse_args(arguments)
    assert exit_info.value.code == 2
    printed = capsys.readouterr()
    prefix = "python -m dflash_jax.serve: error: "
    assert printed.out == ""
    assert printed.err.startswith(prefix)
    sentence = printed.err.removeprefix(prefix)
    assert sentence.endswith((".\n", "?\n"))
    assert sentence.count("\n") == 1
    return sentence.strip()


def listed(arguments) -> list[str]:
    return arguments.split() if isinstance(arguments, str) else arguments
