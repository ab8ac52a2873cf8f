"""The embedded pair is what runs when nothing is named: lossless and small, whatever it was trained on."""

import json

import pytest

from dflash_jax import LLM, SamplingParams, generate
from dflash_jax.weights.folder import EMBEDDED, PAIRS, resolve_folders
from tests.pairs import greedy, tokens_of
from tests.serve.live import Live, free_port, start

ENGINE = {"max_num_seqs": 1, "max_model_len": 256}


@pytest.fixture(scope="module")
def llm():
    return LLM(**ENGINE, num_speculative_tokens=5)


def test_same_tokens_without_the_drafter(llm):
    params = [greedy(24), SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True)]
    outputs = llm.generate([generate.EMBEDDED_PROMPT] * 2, params)
    alone = LLM(EMBEDDED / "target", **ENGINE).generate([generate.EMBEDDED_PROMPT] * 2, params)
    assert tokens_of(outputs) == tokens_of(alone)
    assert outputs[0].metrics.mean_acceptance_length > 1


def test_chat(llm):
    (result,) = llm.chat([{"role": "user", "content": generate.EMBEDDED_PROMPT}], greedy(4))
    assert len(result.outputs[0].token_ids) == 4


def test_tokenizer_round_trip(llm):
    text = 'def greet(name):\n    return f"Grüße, {name}! 世界 🎉"\n\n\n\tApache License\n'
    assert llm.tokenizer.decode(llm.tokenizer.encode(text)) == text
    vocab_size = llm.engine.target.config.vocab_size
    assert {llm.tokenizer.eos_token_id, llm.engine.draft.config.mask_token_id} <= set(range(vocab_size))


def test_the_command_without_arguments(llm, monkeypatch, capsys):
    named = []
    monkeypatch.setattr("dflash_jax.loading.LLM", lambda *folders, **options: named.append(folders) or llm)
    assert generate.main(["--max-tokens", "4", "--ignore-eos"]) == 0
    assert named == [(EMBEDDED / "target", EMBEDDED / "draft")]
    text = llm.generate(generate.EMBEDDED_PROMPT, greedy(4))[0].outputs[0].text
    assert capsys.readouterr().out == text + "\n"


def test_the_server_without_arguments(tmp_path):
    port, log = free_port(), tmp_path / "log"
    live = Live(f"http://127.0.0.1:{port}", start(log, f"--port={port}"), log)
    try:
        live.wait_until(lambda: live.is_healthy() or live.process.poll() is not None)
        (model,) = json.loads(live.get("/v1/models")[1])["data"]
        assert model["id"] == "dflash-embedded"
        status, answer = live.post("/v1/completions", {"prompt": generate.EMBEDDED_PROMPT, "max_tokens": 1})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 1)
    finally:
        live.process.terminate()
        assert live.process.wait(60) == 0


def test_the_hybrid_pair_by_its_name():
    """Its drafts are right about most of what it says; `tests/serve/test_conversations.py` talks to it at length."""
    folder = PAIRS["embedded-hybrid"]
    assert resolve_folders("embedded-hybrid", None) == (folder / "target", folder / "draft")
    llm = LLM("embedded-hybrid", **ENGINE, num_speculative_tokens=15)
    assert llm.engine.target.config.attention_layers == (3, 7)
    (output,) = llm.generate([generate.EMBEDDED_PROMPT], greedy(64))
    assert output.metrics.mean_acceptance_length > 3
    assert "self" in output.outputs[0].text


def test_the_pair_without_a_name_has_one():
    assert resolve_folders("embedded", None) == resolve_folders(None, None) == (EMBEDDED / "target", EMBEDDED / "draft")


@pytest.mark.parametrize(("name", "most"), [("embedded", 20), ("embedded-hybrid", 8)])
def test_is_small_and_described(name, most):
    folder = PAIRS[name]
    assert len((folder / "README.md").read_text(encoding="utf-8")) > 200
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= most * 2**20
