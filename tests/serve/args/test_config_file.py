"""The YAML file of `--config` sets what flags set, and is refused where they are."""

import pytest

from dflash_jax.options.serve_command import parse_args
from tests.serve.args.common import listed, refusal, value
from tests.serve.args.test_accepted import ACCEPTED

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
        ("speculative-config: [1]", ["c.yaml: speculative-config is of type list", "JSON"]),
        ("config-file: x", ["c.yaml: there is no config-file;"]),
        ("host: {a: 1}", ["c.yaml: host is of type dict"]),
        ("host: 0123", ["c.yaml: host is of type int", "quotes"]),
        ("api-key: [[a]]", ["c.yaml: api-key is of type list"]),
        ("log-level: off", ["c.yaml: log-level is of type bool", "warning"]),
        ("restart-engine: 1", ["c.yaml: restart-engine=1", "true or false"]),
        ("model: a\nmodel-path: b", ["c.yaml: ", "'a'", "'b'"]),
        ("speculative-config: {method: eagle}", ["c.yaml: ", "method='eagle'"]),
    ],
)
def test_a_bad_file_is_refused(capsys, config, content, words):
    sentence = refusal(capsys, config(content))
    for word in words:
        assert word in sentence
