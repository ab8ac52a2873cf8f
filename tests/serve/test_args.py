"""The command line: every field has a flag, every flag has a text, and what is wrong is refused in one sentence."""

import json
import os
from dataclasses import fields

import pytest
import yaml

from dflash_jax.config import EngineArgs
from dflash_jax.serve.args import ABSENT, SERVER_ENGINE, Limits, ServeArgs, parse_args
from dflash_jax.serve.flags import GROUPS, build_parser

SPEC = '{"method": "dflash", "model": "d", "num_speculative_tokens": 15, "kv_cache_dtype": "fp8"}'
PARTS = {f.name: part for part in (ServeArgs, EngineArgs, Limits) for f in fields(part)}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """Files that flags name, in the working folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("cert.pem", "key.pem", "ca.pem"):
        (tmp_path / name).write_text("PEM")
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "plain.jinja").write_text("always the same")
    (tmp_path / "blank").write_text("\n")
    (tmp_path / "keys").write_text("# keys\n\n k1 \nk2\n")
    (tmp_path / "no_keys").write_text("# none\n\n")
    (tmp_path / "bad_keys").write_text("one\nto ken\n")
    (tmp_path / "latin").write_bytes(b"\xe9{")
    (tmp_path / "sampling").mkdir()
    (tmp_path / "sampling" / "generation_config.json").write_text("{}")
    return tmp_path


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


# --- what is accepted: arguments, the field, its value

TLS = ["--ssl-certfile", "cert.pem"]
CORS = ["--allowed-origins", "https://a"]
ACCEPTED = [
    ("Qwen/Qwen3-8B", "model", "Qwen/Qwen3-8B"),
    ("--port 1 Qwen/Qwen3-8B --host h", "model", "Qwen/Qwen3-8B"),
    ("--model m", "model", "m"),
    ("--model-path m", "model", "m"),
    ("m --model m", "model", "m"),
    ("", "served_model_name", ("dflash-embedded",)),
    ("some/model", "served_model_name", ("some/model",)),
    ("m --served-model-name a b --served-model-name c", "served_model_name", ("a", "b", "c")),
    ("--generation-config vllm", "generation_config", "vllm"),
    ("--generation-config sampling", "generation_config", "sampling"),
    (["--override-generation-config", '{"top_k": 5}'], "override_generation_config", {"top_k": 5}),
    ("--chat-template chat.jinja", "chat_template", "{{ messages }}"),
    ("--chat-template plain.jinja", "chat_template", "always the same"),
    (["--chat-template", "{{ a }} b"], "chat_template", "{{ a }} b"),
    (["--chat-template", "--a {{ b }}"], "chat_template", "--a {{ b }}"),
    (["--default-chat-template-kwargs", '{"a": false}'], "default_chat_template_kwargs", {"a": False}),
    ("--draft-model d", "draft_model", "d"),
    ("--spec-model d", "draft_model", "d"),
    ("--speculative-draft-model-path d", "draft_model", "d"),
    (["m", "--speculative-config", SPEC], "draft_model", "d"),
    (["m", "--speculative-config", SPEC], "num_speculative_tokens", 15),
    (["m", "--speculative-config", SPEC], "draft_kv_cache_dtype", "fp8"),
    (["m", "--speculative-config", SPEC, "--spec-tokens", "15"], "num_speculative_tokens", 15),
    ("--num-speculative-tokens 7", "num_speculative_tokens", 7),
    ("--spec-tokens 7", "num_speculative_tokens", 7),
    ("--num-speculative-tokens none", "num_speculative_tokens", None),
    ("--speculative-num-draft-tokens 16", "num_speculative_tokens", 15),
    ("--speculative-num-draft-tokens 16 --spec-tokens 15", "num_speculative_tokens", 15),
    ("m --spec-method dflash --spec-model d", "draft_model", "d"),
    ("m --speculative-algorithm DFLASH --speculative-draft-model-path d", "draft_model", "d"),
    ("--draft-kv-cache-dtype fp8_e5m2", "draft_kv_cache_dtype", "fp8_e5m2"),
    ("--dtype float32", "dtype", "float32"),
    ("--kv-cache-dtype fp8", "kv_cache_dtype", "fp8"),
    ("--max-model-len 512", "max_model_len", 512),
    ("--max-model-len none", "max_model_len", None),
    ("--max_model_len=512", "max_model_len", 512),
    ("--context-length 32k", "max_model_len", 32_000),
    ("--max-model-len 32K", "max_model_len", 32_768),
    ("--max-model-len 1M", "max_model_len", 1_048_576),
    ("--max-model-len 25.6k", "max_model_len", 25_600),
    ("--max-model-len 1.001k", "max_model_len", 1001),
    ("--max-num-seqs 3", "max_num_seqs", 3),
    ("--max-running-requests 3", "max_num_seqs", 3),
    ("--max-num-seqs 3 --max-num-seqs 4", "max_num_seqs", 4),
    ("", "max_num_queued_seqs", 4096),
    ("--max-num-queued-reqs 5", "max_num_queued_seqs", 5),
    ("--max-queued-requests 5", "max_num_queued_seqs", 5),
    ("--max-num-queued-reqs none", "max_num_queued_seqs", None),
    ("--max-num-batched-tokens 2k", "max_num_batched_tokens", 2000),
    ("--chunked-prefill-size 4096", "max_num_batched_tokens", 4096),
    ("--tensor-parallel-size 2", "tensor_parallel_size", 2),
    ("-tp 2", "tensor_parallel_size", 2),
    ("-tp=2", "tensor_parallel_size", 2),
    ("--tp-size 2", "tensor_parallel_size", 2),
    ("--tp 2", "tensor_parallel_size", 2),
    ("--block-size 16", "page_size", 16),
    ("--page-size 16", "page_size", 16),
    ("--no-enable-prefix-caching", "enable_prefix_caching", False),
    ("--disable-radix-cache", "enable_prefix_caching", False),
    ("--disable-radix-cache --enable-prefix-caching", "enable_prefix_caching", True),
    ("--gpu-memory-utilization 0.5", "gpu_memory_utilization", 0.5),
    ("--mem-fraction-static 1", "gpu_memory_utilization", 1.0),
    ("--kv-cache-memory-bytes 2G", "kv_cache_memory_bytes", 2**31),
    ("", "compile_at_start", None),
    ("--no-compile-at-start --compile-at-start", "compile_at_start", True),
    ("--no-compile-at-start", "compile_at_start", False),
    ("--seed -7", "seed", -7),
    ("--random-seed 7", "seed", 7),
    ("--seed none", "seed", None),
    ("--host 0.0.0.0", "host", "0.0.0.0"),
    ("--port 0", "port", 0),
    ("--uds server.sock", "uds", "server.sock"),
    ("--root-path /llm", "root_path", "/llm"),
    ("--fastapi-root-path /a/b", "root_path", "/a/b"),
    ("--shutdown-timeout 0", "shutdown_timeout", 0.0),
    ("--restart-engine", "restart_engine", True),
    ("", "enable_docs", True),
    ("--disable-fastapi-docs", "enable_docs", False),
    ("--api-key a --api-key b", "api_keys", ("a", "b")),
    ("--api-key=--a", "api_keys", ("--a",)),
    ("--api-key a --api-key-file keys", "api_keys", ("a", "k1", "k2")),
    ("--api-key a m", "model", "m"),
    (TLS, "ssl_certfile", "cert.pem"),
    ([*TLS, "--ssl-keyfile", "key.pem"], "ssl_keyfile", "key.pem"),
    ([*TLS, "--ssl-ca-certs", "ca.pem", "--ssl-cert-reqs", "2"], "ssl_ca_certs", "ca.pem"),
    ([*TLS, "--ssl-ca-certs", "ca.pem", "--ssl-cert-reqs", "1"], "ssl_cert_reqs", 1),
    ("--ssl-cert-reqs 0", "ssl_cert_reqs", 0),
    ("--allowed-origins https://a --allowed-origins https://b", "allowed_origins", ("https://a", "https://b")),
    (["--allowed-origins", '["https://a", "*"]'], "allowed_origins", ("https://a", "*")),
    ([*CORS, "--allowed-methods", "GET"], "allowed_methods", ("GET",)),
    ([*CORS, "--allowed-headers", '["x-a"]', "--allowed-headers", "x-b"], "allowed_headers", ("x-a", "x-b")),
    ([*CORS, "--allow-credentials"], "allow_credentials", True),
    ("--max-request-body-bytes 1M", "max_request_body_bytes", 1_048_576),
    ("--max-header-bytes 1000", "max_header_bytes", 1000),
    ("--request-header-timeout 0.5", "request_header_timeout", 0.5),
    ("--request-body-timeout 5", "request_body_timeout", 5.0),
    ("--request-timeout 5", "request_timeout", 5.0),
    ("--request-timeout none", "request_timeout", None),
    ("--max-concurrent-requests 2", "max_concurrent_requests", 2),
    ("--max-n 16384", "max_n", 16_384),
    ("--max-prompts 1", "max_prompts", 1),
    ("--max-stop-strings 0", "max_stop_strings", 0),
    ("--max-logprobs 0", "max_logprobs", 0),
    ("--reasoning-parser qwen3", "reasoning_parser", "qwen3"),
    ("--reasoning-parser qwen3-thinking", "reasoning_parser", "qwen3"),
    ("--tool-call-parser qwen3_coder", "tool_call_parser", "qwen3_coder"),
    ("--tool-call-parser qwen", "tool_call_parser", "hermes"),
    ("--tool-call-parser qwen25", "tool_call_parser", "hermes"),
    ("--enable-auto-tool-choice --tool-call-parser hermes", "enable_auto_tool_choice", True),
    ("--stream-interval 4", "stream_interval", 4),
    ("--sse-keep-alive-interval 0", "sse_keep_alive_interval", 0.0),
    ("--enable-request-id-headers", "enable_request_id_headers", True),
    ("--enable-prompt-tokens-details", "enable_prompt_tokens_details", True),
    ("--enable-cache-report", "enable_prompt_tokens_details", True),
    ("--enable-force-include-usage", "enable_force_include_usage", True),
    ("--per-request-spec-decode-metrics detailed", "per_request_spec_decode_metrics", "detailed"),
    ("--log-level debug", "log_level", "debug"),
    ("--enable-log-requests", "enable_log_requests", True),
    ("--log-requests", "enable_log_requests", True),
    ("--max-log-len 0", "max_log_len", 0),
    ("--disable-log-stats", "disable_log_stats", True),
    ("--disable-log-stats --no-disable-log-stats", "disable_log_stats", False),
    ("--log-stats-interval 1", "log_stats_interval", 1.0),
    ("--metrics-prefix vllm:", "metrics_prefix", "vllm:"),
    ("--profile-dir traces", "profile_dir", "traces"),
]


def listed(arguments) -> list[str]:
    return arguments.split() if isinstance(arguments, str) else arguments


@pytest.mark.parametrize(("arguments", "name", "expected"), ACCEPTED)
def test_accepted(arguments, name, expected):
    found = value(parse_args(listed(arguments)), name)
    assert found == expected
    assert type(found) is type(expected)


def test_every_field_can_be_set_to_something_else():
    changed = {name for _, name, expected in ACCEPTED if expected != value(ServeArgs(), name)}
    assert changed == PARTS.keys() - {"engine", "limits"}
    assert len(PARTS) == sum(len(fields(part)) for part in (ServeArgs, EngineArgs, Limits)), "two fields share a name"


def test_every_name_of_a_flag_is_tried():
    given = [argument.split("=")[0].replace("_", "-") for row in ACCEPTED for argument in listed(row[0])]
    untried = {name for name in parser().flags if name not in given and not name.startswith("--no-")}
    assert untried == {"--config"}


def test_no_arguments_are_the_defaults():
    assert parse_args([]) == ServeArgs()
    assert EngineArgs(compile_at_start=None, max_num_queued_seqs=4096) == SERVER_ENGINE


def test_vllm_and_sglang_say_the_same():
    vllm = ["m", "--speculative-config", json.dumps({"method": "dflash", "model": "d", "num_speculative_tokens": 15})]
    sglang = "--model-path m --speculative-algorithm DFLASH --speculative-draft-model-path d"
    plain = "--model m --draft-model d --num-speculative-tokens 15"
    expected = parse_args(plain.split())
    assert parse_args(vllm) == expected
    assert parse_args([*sglang.split(), "--speculative-num-draft-tokens", "16"]) == expected


def test_keys_are_not_printed():
    assert "hush" not in repr(parse_args(["--api-key", "hush"]))


# --- what is refused: arguments, and words of the sentence

REFUSED = [
    ("--max-modle-len 5", ["there is no --max-modle-len", "did you mean --max-model-len?"]),
    ("--model m --max-sequences 4", ["there is no --max-sequences"]),  # and not: 4 is a second model
    (["--prot=a b"], ["there is no --prot", "--port?"]),
    ("--max-model 5", ["there is no --max-model;"]),  # no abbreviations
    ("-x", ["there is no -x"]),
    ("m --swap-space 4", ["--swap-space is not supported", "--max-model-len"]),
    ("--trust_remote_code", ["--trust-remote-code is not supported", "no code"]),
    ("--no-enable-chunked-prefill", ["--no-enable-chunked-prefill is not supported", "--max-num-batched-tokens"]),
    ("-dp 2", ["-dp is not supported", "router"]),
    ("m1 m2", ["'m2'", "one argument too many"]),
    ("m1 --model m2", ["--model", "'m1'", "'m2'", "keep one"]),
    (["--model", " "], ["--model", "empty"]),
    (["--host", ""], ["--host", "empty"]),
    ("--port", ["--port", "expected one argument"]),
    ("--port 65536", ["--port", "'65536'", "65535"]),
    ("--port -1", ["--port", "'-1'", "at least 0"]),
    ("--port x", ["--port", "'x'"]),
    ("--uds no/folder/s", ["--uds", "'no/folder/s'"]),
    ("--uds s --port 8000", ["--uds", "--port"]),
    ("--uds s --port 0", ["--uds", "--port"]),
    ("--uds s --host 127.0.0.1", ["--uds", "--host"]),
    ("--root-path llm", ["--root-path", "'llm'", "slash"]),
    ("--root-path /llm/", ["--root-path", "'/llm/'", "slash"]),
    ("--dtype float16", ["--dtype", "'float16'", "bfloat16"]),
    ("--kv-cache-dtype int8", ["--kv-cache-dtype", "'int8'", "fp8_e4m3"]),
    ("--max-model-len 0", ["--max-model-len", "'0'", "at least 1"]),
    ("--max-model-len auto", ["--max-model-len", "'auto'", "none"]),
    ("--max-model-len 1.0001k", ["--max-model-len", "'1.0001k'"]),
    ("--max-model-len 1e3", ["--max-model-len", "'1e3'"]),
    (f"--max-num-seqs {'9' * 5000}", ["--max-num-seqs", "integer"]),
    ("--max-num-seqs none", ["--max-num-seqs", "'none'"]),
    ("--max-num-seqs 2.5", ["--max-num-seqs", "'2.5'"]),
    ("--gpu-memory-utilization 0", ["--gpu-memory-utilization", "'0'", "above 0", "at most 1"]),
    ("--gpu-memory-utilization 1.1", ["--gpu-memory-utilization", "'1.1'", "at most 1"]),
    ("--gpu-memory-utilization nan", ["--gpu-memory-utilization", "'nan'"]),
    ("--shutdown-timeout inf", ["--shutdown-timeout", "'inf'"]),
    ("--shutdown-timeout -1", ["--shutdown-timeout", "'-1'"]),
    ("--request-timeout 0", ["--request-timeout", "'0'", "above 0"]),
    ("--request-header-timeout 0", ["--request-header-timeout"]),
    ("--request-body-timeout 0", ["--request-body-timeout"]),
    ("--sse-keep-alive-interval -1", ["--sse-keep-alive-interval"]),
    ("--log-stats-interval 0", ["--log-stats-interval"]),
    ("--stream-interval 0", ["--stream-interval"]),
    ("--max-request-body-bytes 0", ["--max-request-body-bytes"]),
    ("--max-header-bytes 0", ["--max-header-bytes"]),
    ("--max-concurrent-requests 0", ["--max-concurrent-requests"]),
    ("--max-n 16385", ["--max-n", "16384"]),
    ("--max-n 0", ["--max-n", "at least 1"]),
    ("--max-prompts 0", ["--max-prompts"]),
    ("--max-stop-strings -1", ["--max-stop-strings"]),
    ("--max-logprobs 21", ["--max-logprobs", "20"]),
    ("--max-log-len -1", ["--max-log-len"]),
    ("m --num-speculative-tokens 3", ["--num-speculative-tokens", "--draft-model"]),
    ("m --spec-method dflash", ["--spec-method", "--draft-model"]),
    ("m --draft-kv-cache-dtype fp8", ["--draft-kv-cache-dtype", "--draft-model"]),
    ("--num-speculative-tokens 0", ["--num-speculative-tokens", "'0'"]),
    ("--speculative-num-draft-tokens 1", ["--speculative-num-draft-tokens", "'1'", "at least 2"]),
    ("--speculative-algorithm EAGLE3", ["--speculative-algorithm", "'EAGLE3'", "dflash"]),
    ("--draft-model a --spec-model b", ["--spec-model", "'a'", "'b'", "keep one"]),
    ("--spec-tokens 7 --speculative-num-draft-tokens 16", ["--speculative-num-draft-tokens", "7", "15", "keep one"]),
    (["--draft-model", "x", "--speculative-config", SPEC], ["--speculative-config", "draft_model", "'x'", "'d'"]),
    (["--speculative-config", SPEC, "--spec-tokens", "3"], ["--spec-tokens", "15", "3"]),
    (["--speculative-config", '{"method": "ngram"}'], ["--speculative-config", "method='ngram'", "dflash"]),
    (["--speculative-config", '{"revision": "x"}'], ["--speculative-config", "'revision'", "num_speculative_tokens"]),
    (["--speculative-config", '{"num_speculative_tokens": "3"}'], ["num_speculative_tokens='3'", "integer"]),
    (["--speculative-config", '{"num_speculative_tokens": true}'], ["num_speculative_tokens=True", "integer"]),
    (["--speculative-config", '{"model": ""}'], ["model=''", "folder"]),
    (["--speculative-config", '{"kv_cache_dtype": []}'], ["kv_cache_dtype=[]", "fp8"]),
    (["--speculative-config", "[1]"], ["--speculative-config", "'[1]'", "object"]),
    (["--speculative-config", "{method: dflash}"], ["--speculative-config", "not JSON"]),
    (["--default-chat-template-kwargs", "[" * 100_000], ["--default-chat-template-kwargs", "not JSON"]),
    (["--override-generation-config", "3"], ["--override-generation-config", "object"]),
    ("--generation-config nowhere", ["--generation-config", "'nowhere'", "generation_config.json"]),
    ("--chat-template nowhere.jinja", ["--chat-template", "'nowhere.jinja'", "No such file"]),
    ("--chat-template sampling", ["--chat-template", "'sampling'", "directory"]),
    ("--chat-template latin", ["--chat-template", "'latin'", "UTF-8"]),
    ("--chat-template blank", ["--chat-template", "empty"]),
    ("--ssl-certfile nowhere", ["--ssl-certfile", "'nowhere'", "No such file"]),
    (["--ssl-certfile", "a\0"], ["--ssl-certfile", "null"]),
    ("--ssl-keyfile key.pem", ["--ssl-keyfile needs --ssl-certfile"]),
    ("--ssl-ca-certs ca.pem --ssl-cert-reqs 2", ["--ssl-ca-certs needs --ssl-certfile"]),
    ([*TLS, "--ssl-cert-reqs", "2"], ["--ssl-cert-reqs needs --ssl-ca-certs"]),
    ([*TLS, "--ssl-ca-certs", "ca.pem"], ["--ssl-ca-certs needs --ssl-cert-reqs"]),
    ([*TLS, "--ssl-cert-reqs", "3"], ["--ssl-cert-reqs", "'3'"]),
    ("--allow-credentials", ["--allow-credentials needs --allowed-origins"]),
    ("--allowed-methods GET", ["--allowed-methods needs --allowed-origins"]),
    ("--allowed-headers x-a", ["--allowed-headers needs --allowed-origins"]),
    ("--allow-credentials --allowed-origins *", ["--allow-credentials", "--allowed-origins=*"]),
    (["--allowed-origins", "[1]"], ["--allowed-origins", "'[1]'"]),
    (["--allowed-origins", "[]"], ["--allowed-origins", "'[]'"]),
    (["--allowed-origins", "[x"], ["--allowed-origins", "'[x'"]),
    (["--allowed-origins", ""], ["--allowed-origins"]),
    (["--api-key", ""], ["--api-key", "not empty"]),
    (["--api-key", "two words"], ["--api-key", "spaces"]),
    (["--api-key", "ключ"], ["--api-key", "ASCII"]),
    ("--api-key-file nowhere", ["--api-key-file", "'nowhere'"]),
    ("--api-key-file no_keys", ["--api-key-file", "'no_keys'", "no key"]),
    ("--api-key-file bad_keys", ["--api-key-file", "spaces"]),
    ("--enable-auto-tool-choice", ["--enable-auto-tool-choice needs --tool-call-parser"]),
    ("--tool-call-parser mistral", ["--tool-call-parser", "'mistral'", "hermes"]),
    ("--reasoning-parser deepseek_r1", ["--reasoning-parser", "'deepseek_r1'", "qwen3"]),
    ("--metrics-prefix 1x:", ["--metrics-prefix", "'1x:'"]),
    ("--metrics-prefix vllm", ["--metrics-prefix", "'vllm'"]),
    (["--metrics-prefix", ""], ["--metrics-prefix"]),
    ("--profile-dir cert.pem", ["--profile-dir", "'cert.pem'", "not a folder"]),
    ("--log-level loud", ["--log-level", "'loud'", "warning"]),
    ("--per-request-spec-decode-metrics all", ["--per-request-spec-decode-metrics", "'all'", "summary"]),
    ("--restart-engine=yes", ["--restart-engine", "'yes'"]),
    ("--config nowhere.yaml", ["--config", "'nowhere.yaml'", "No such file"]),
    ("--config latin", ["--config", "'latin'"]),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=lambda row: str(row)[:60])
def test_refused(capsys, arguments, words):
    sentence = refusal(capsys, listed(arguments))
    for word in words:
        assert word in sentence


@pytest.mark.parametrize("key", ["two words", "ключ"])
def test_a_refused_key_is_not_shown(capsys, key, files):
    (files / "file").write_text(key)
    (files / "c.yaml").write_text("api-key: 12345")
    assert key not in refusal(capsys, ["--api-key", key])
    assert key not in refusal(capsys, ["--api-key-file", "file"])
    assert "12345" not in refusal(capsys, ["--config", "c.yaml"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused(capsys, files):
    (files / "key.pem").chmod(0)
    assert "Permission denied" in refusal(capsys, [*TLS, "--ssl-keyfile", "key.pem"])


def test_absent_flags_are_absent_and_explained():
    flags = {name.lstrip("-") for name in parser().flags}
    assert not flags & ABSENT.keys()
    for reason in ABSENT.values():
        assert reason[-1] not in ".;"
        for word in reason.replace(";", "").replace(",", "").split():
            assert not word.startswith("--") or word in parser().flags, f"advice names {word}, which is no flag"


# --- help


def test_help_tells_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_args(["--help"])
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    words = " ".join(shown.split())
    for group in GROUPS:
        assert f"\n{group}:\n" in shown
    for name, action in parser().flags.items():
        assert name in shown
        assert action.help
        assert len(action.help.split("(default:")[0].split()) >= 3, f"{name} is not explained"
        assert action.help.count("(default:") == 1
    for text in ("(default: 8000)", "(default: 0)", "(default: 0.9)", "(default: 16777216)", "(default: 127.0.0.1)"):
        assert text in words
    assert "None" not in shown


# --- the YAML file

CONFIG = {
    "model": "m",
    "served_model_name": ["a", "b"],
    "speculative-config": {"method": "dflash", "model": "d", "num_speculative_tokens": 15},
    "max-model-len": "32k",
    "gpu_memory_utilization": 0.5,
    "port": 9000,
    "enable-prefix-caching": False,
    "disable_log_stats": True,
    "restart-engine": False,
    "disable-fastapi-docs": False,
    "api-key": ["k1", "--k2"],
    "allowed_origins": ["https://a"],
    "default-chat-template-kwargs": {"enable_thinking": False, "deep": {"a": [1, None]}},
    "seed": "none",
}
SAME = [
    *("m", "--served-model-name", "a", "b", "--spec-model", "d", "--spec-tokens", "15", "--max-model-len", "32000"),
    *("--gpu-memory-utilization", "0.5", "--port", "9000", "--no-enable-prefix-caching", "--disable-log-stats"),
    *("--api-key", "k1", "--api-key=--k2", "--allowed-origins", "https://a", "--seed", "none"),
    *("--default-chat-template-kwargs", '{"enable_thinking": false, "deep": {"a": [1, null]}}'),
]


@pytest.fixture
def config(files):
    def write(content) -> list[str]:
        (files / "c.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return ["--config", "c.yaml"]

    return write


def test_the_file_says_what_flags_say(config):
    assert parse_args(config(CONFIG)) == parse_args(SAME)


def test_the_command_line_wins_over_the_file(config):
    arguments = "n --enable-prefix-caching --api-key k3 --spec-tokens 7 --no-disable-log-stats --port 1"
    args = parse_args([*config(CONFIG), *arguments.split()])
    assert (args.model, args.port, args.api_keys, args.disable_log_stats) == ("n", 1, ("k3",), False)
    assert (args.engine.enable_prefix_caching, args.engine.num_speculative_tokens) == (True, 7)
    assert (args.draft_model, args.served_model_name, args.engine.max_model_len) == ("d", ("a", "b"), 32_000)
    assert parse_args([*arguments.split(), *config(CONFIG)]) == args  # wherever it stands


def test_every_row_can_come_from_the_file(config):
    for arguments, name, expected in ACCEPTED:
        flags = listed(arguments)
        if len(flags) == 2 and flags[0].startswith("--") and not flags[1].startswith("--"):
            key, text = flags[0].removeprefix("--"), flags[1]
            assert value(parse_args(config({key: text})), name) == expected, key
        elif len(flags) == 1 and flags[0].startswith("--") and "=" not in flags[0]:
            assert value(parse_args(config({flags[0].removeprefix("--"): True})), name) == expected, flags


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["mapping"]),
        ("- port", ["mapping"]),
        ("a: [", ["cannot be read", "YAML"]),
        ("max_modle_len: 5", ["c.yaml: there is no max-modle-len; did you mean max-model-len?"]),
        ("3: 5", ["c.yaml: there is no 3;"]),
        ("config: c.yaml", ["c.yaml: there is no config;"]),
        ("help: true", ["c.yaml: there is no help;"]),
        ("tokenizer: x", ["c.yaml: tokenizer is not supported", "model folder"]),
        ("port: 70000", ["c.yaml: ", "--port", "65535"]),
        ("port: true", ["c.yaml: port is of type bool", "PORT"]),
        ("port: [1, 2]", ["c.yaml: port is of type list", "PORT"]),
        ("port:", ["c.yaml: port is empty", "PORT", "leave"]),
        ("host: {a: 1}", ["c.yaml: host is of type dict"]),
        ("host: 0123", ["c.yaml: host is of type int", "quotes"]),
        ("api-key: [[a]]", ["c.yaml: api-key is of type list"]),
        ("log-level: off", ["c.yaml: log-level is of type bool", "warning"]),
        ("restart-engine: 1", ["c.yaml: restart-engine=1", "true or false"]),
        ("model: a\nmodel-path: b", ["c.yaml: ", "'a'", "'b'"]),
        ("speculative-config: {method: eagle}", ["c.yaml: ", "method='eagle'"]),
        ("enable-auto-tool-choice: true", ["--enable-auto-tool-choice needs --tool-call-parser"]),
    ],
)
def test_a_bad_file_is_refused(capsys, config, content, words):
    sentence = refusal(capsys, config(content))
    for word in words:
        assert word in sentence
