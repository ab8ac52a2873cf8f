"""The server's command line refuses in one sentence, which names the flag, the value and what to do."""

import os

import pytest

from dflash_jax.base.errors import ConfigError
from dflash_jax.options.absent import ABSENT
from dflash_jax.options.serve_command import read_args
from dflash_jax.options.serve_flags import build_parser
from dflash_jax.serve import server
from tests.serve.args.common import SPEC, TLS, listed, refusal

# arguments, and words of the sentence
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
    ("--block-size none", ["--block-size", "'none'"]),
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
    ("--draft-quantization int3", ["--draft-quantization", "'int3'", "fp8"]),
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
    (["--speculative-config", '{"quantization": "awq"}'], ["quantization='awq'", "fp8"]),
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


@pytest.mark.parametrize(
    "option", ["num-speculative-tokens 3", "spec-method dflash", "draft-kv-cache-dtype fp8", "draft-quantization fp8"]
)
def test_options_of_speculation_need_a_drafter(capsys, option):
    """They are refused before the server listens or looks for the model."""
    assert server.main(["some/model", *f"--{option}".split()]) == 2
    flag = option.split()[0]
    expected = f"error: --{flag} needs a drafter; give --draft-model, or leave it out.\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("flags", [["--zzz"], ["-z9"], ["--no-such-thing-at-all"]])
def test_only_near_names_are_suggested(capsys, flags):
    sentence = refusal(capsys, flags)
    assert sentence == f"there is no {flags[0]}; --help lists what there is."


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
    flags = {name.lstrip("-") for name in build_parser().flags}
    assert not flags & ABSENT.keys()
    for reason in ABSENT.values():
        assert reason[-1] not in ".;"
        for word in reason.replace(";", "").replace(",", "").split():
            assert not word.startswith("--") or word in build_parser().flags, f"advice names {word}, which is no flag"


def test_a_caller_that_is_no_command_gets_the_error_itself():
    with pytest.raises(ConfigError, match="there is no --nonsense"):
        read_args(["--nonsense"])
    assert read_args(["--port=7"]).port == 7
