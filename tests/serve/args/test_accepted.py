"""The server's command line: what each flag accepts, that each field has a flag, and that each flag has a help."""

import json
from dataclasses import fields

import pytest

from dflash_jax.options import EngineArgs
from dflash_jax.options.serve_args import GROUPS, SERVER_ENGINE, Limits, ServeArgs
from dflash_jax.options.serve_command import parse_args
from dflash_jax.options.serve_flags import build_parser
from tests.serve.args.common import CORS, PARTS, SPEC, TLS, listed, value

# arguments, the field, its value
ACCEPTED = [
    ("Qwen/Qwen3-8B", "model", "Qwen/Qwen3-8B"),
    ("--port 1 Qwen/Qwen3-8B --host h", "model", "Qwen/Qwen3-8B"),
    ("--model m", "model", "m"),
    ("--model-path m", "model", "m"),
    ("m --model m", "model", "m"),
    ("smollm2 --num-speculative-tokens 3", "num_speculative_tokens", 3),
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
    (["m", "--speculative-config", SPEC], "draft_quantization", "fp8"),
    (["m", "--speculative-config", SPEC, "--spec-tokens", "15"], "num_speculative_tokens", 15),
    ("--num-speculative-tokens 7", "num_speculative_tokens", 7),
    ("--spec-tokens 7", "num_speculative_tokens", 7),
    ("--num-speculative-tokens none", "num_speculative_tokens", None),
    ("--speculative-num-draft-tokens 16", "num_speculative_tokens", 15),
    ("--speculative-num-draft-tokens 16 --spec-tokens 15", "num_speculative_tokens", 15),
    ("m --spec-method dflash --spec-model d", "draft_model", "d"),
    ("--spec-method dflash", "spec_method", "dflash"),
    ("m --speculative-algorithm DFLASH --speculative-draft-model-path d", "draft_model", "d"),
    ("--draft-kv-cache-dtype fp8_e5m2", "draft_kv_cache_dtype", "fp8_e5m2"),
    ("--draft-quantization fp8", "draft_quantization", "fp8"),
    ("--draft-quantization int4", "draft_quantization", "int4"),
    ("--speculative-draft-model-quantization fp8", "draft_quantization", "fp8"),
    ("--dtype float32", "dtype", "float32"),
    ("--quantization fp8", "quantization", "fp8"),
    ("--quantization auto-round", "quantization", "auto-round"),
    ("-q gptq_marlin", "quantization", "gptq_marlin"),
    ("--kv-cache-dtype fp8", "kv_cache_dtype", "fp8"),
    ("--kv-cache-dtype int4_had", "kv_cache_dtype", "int4_had"),
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
    ("--gpu-memory-bytes 23.0GiB", "gpu_memory_bytes", 23 * 2**30),
    ("--gpu-memory-bytes 24GB", "gpu_memory_bytes", 24 * 10**9),
    ("--gpu-memory-bytes 1.5gib", "gpu_memory_bytes", 3 * 2**29),
    ("--gpu-memory-bytes 23G", "gpu_memory_bytes", 23 * 2**30),
    ("--gpu-memory-bytes 5", "gpu_memory_bytes", 5),
    ("--gpu-memory-bytes none", "gpu_memory_bytes", None),
    ("--state-cache-fraction 0.5", "state_cache_fraction", 0.5),
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
    ("--reasoning-parser none", "reasoning_parser", "none"),
    ("--tool-call-parser none", "tool_call_parser", "none"),
    ("--tool-call-parser qwen3_coder", "tool_call_parser", "qwen3_coder"),
    ("--tool-call-parser qwen", "tool_call_parser", "hermes"),
    ("--tool-call-parser qwen25", "tool_call_parser", "hermes"),
    ("--enable-auto-tool-choice", "enable_auto_tool_choice", True),
    ("--enable-auto-tool-choice --tool-call-parser hermes", "enable_auto_tool_choice", True),
    ("--stream-interval 4", "stream_interval", 4),
    ("--sse-keep-alive-interval 0", "sse_keep_alive_interval", 0.0),
    ("--enable-request-id-headers", "enable_request_id_headers", True),
    ("--enable-prompt-tokens-details", "enable_prompt_tokens_details", True),
    ("--no-enable-prompt-tokens-details", "enable_prompt_tokens_details", False),
    ("--no-enable-cache-report --enable-cache-report", "enable_prompt_tokens_details", True),
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


@pytest.mark.parametrize(("arguments", "name", "expected"), ACCEPTED)
def test_accepted(arguments, name, expected):
    accepted = value(parse_args(listed(arguments)), name)
    assert accepted == expected
    assert type(accepted) is type(expected)


def test_every_field_can_be_set_to_something_else():
    changed = {name for _, name, expected in ACCEPTED if expected != value(ServeArgs(), name)}
    assert changed == PARTS.keys() - {"engine", "limits"}
    assert len(PARTS) == sum(len(fields(part)) for part in (ServeArgs, EngineArgs, Limits)), "two fields share a name"


def test_every_name_of_a_flag_is_tried():
    tried = [argument.split("=")[0].replace("_", "-") for row in ACCEPTED for argument in listed(row[0])]
    untried = {name for name in build_parser().flags if name not in tried and not name.startswith("--no-")}
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


def test_help_tells_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_args(["--help"])
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    words = " ".join(shown.split())
    for group in GROUPS:
        assert f"\n{group}:\n" in shown
    for name, action in build_parser().flags.items():
        assert name in shown
        assert action.help
        assert len(action.help.split("(default:")[0].split()) >= 3, f"{name} is not explained"
        assert action.help.count("(default:") == 1
    for text in ("(default: 8000)", "(default: 0)", "(default: 0.9)", "(default: 16777216)", "(default: 127.0.0.1)"):
        assert text in words
    assert "None" not in shown
