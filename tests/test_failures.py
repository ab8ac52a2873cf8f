"""What goes wrong costs those it must, and no one else: the engine goes on."""

import logging
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax import LLM, SamplingParams, StructuredOutputsParams
from dflash_jax.engine import engine as engine_module
from dflash_jax.engine.device.slots import Caches, Tables
from dflash_jax.engine.host import inputs
from dflash_jax.engine.host.constraints import Constraint
from dflash_jax.parallel.mesh import Mesh
from tests.conftest import ON_GPU
from tests.pairs import GOLDEN, around_step, assert_empty, golden_cases, golden_llm, greedy, prompt, reciter, tokens_of

PAIR = "qwen3_swa_tied"
CASES = golden_cases(PAIR)
POISON = 77  # a token that no prompt and no answer of the golden cases holds


def run(llm, prompts, params):
    """Outputs, once everything in flight has been read."""
    outputs = llm.generate(prompts, params)
    while not llm.engine.is_idle:
        llm.engine.step()
    assert_empty(llm.engine)
    return outputs


def break_steps(monkeypatch, name, is_broken):
    """Let a step raise as XLA does whenever `is_broken(*arguments)`; its donated state is gone then."""

    def step(run, params, slots, *arguments):
        if is_broken(slots, *arguments):
            caches = next(argument for argument in arguments if isinstance(argument, Caches))
            for array in jax.tree.leaves(caches):
                array.delete()
            raise jax.errors.JaxRuntimeError("INTERNAL: a cosmic ray")
        return run(params, slots, *arguments)

    around_step(monkeypatch, name, step)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="dflash_jax")


def assert_others_are_right(outputs, culprit, words):
    for i, (output, case) in enumerate(zip(outputs, CASES, strict=True)):
        completion = output.outputs[0]
        if i == culprit:
            assert completion.finish_reason == "error"
            assert words in completion.error
        else:
            assert (completion.finish_reason, completion.error) == ("length", None)
            assert completion.token_ids == case["output_ids"]


@pytest.mark.parametrize(
    ("name", "options"),
    [("verify_commit", {}), ("greedy_round", {}), pytest.param("verify", {"logprobs": 1}, marks=pytest.mark.long)],
)
def test_a_step_that_fails_once_costs_nobody(monkeypatch, name, options):
    if name == "verify_commit" and ON_GPU:
        pytest.skip("a step of CPUs")
    if name != "verify_commit":
        monkeypatch.setattr(Mesh, "is_cpu", False)  # as accelerators run rounds
    calls = []
    break_steps(monkeypatch, name, lambda *_: calls.append(1) or len(calls) == 3)
    outputs = run(golden_llm(PAIR), [prompt(*case["input_ids"]) for case in CASES], greedy(80, **options))
    assert len(calls) > 3
    assert_others_are_right(outputs, None, "")


def test_all_run_together_again_once_each_has_completed_a_round_alone(monkeypatch):
    llm = golden_llm(PAIR)
    calls, seen = [], []
    step = "greedy_round" if ON_GPU else "verify_commit"
    break_steps(monkeypatch, step, lambda *_: calls.append(1) or len(calls) == 3)
    for changed in llm.stream([prompt(*case["input_ids"]) for case in CASES[:2]], greedy(80)):
        seen.append((changed.request_id, len(changed.outputs[0].token_ids), changed.finished))
    first = next(i for i, (_, _, finished) in enumerate(seen) if finished)
    others = [count for request_id, count, _ in seen[:first] if request_id != seen[first][0]]
    assert len(calls) > 3
    assert max(others) > 40  # not waiting until the first of the two has ended


def test_who_ends_in_a_step_that_fails_is_told(monkeypatch):
    """The results of earlier rounds are read in the step: they stand whatever fails behind."""
    if ON_GPU:
        pytest.skip("a step of CPUs")
    llm = reciter(max_num_seqs=2, max_model_len=256)
    failed, running = [], llm.engine.scheduler.running

    def is_broken(*_):
        is_first = not failed and any(r.sequence.finished for r in before) and len(running) == 1
        before[:] = running
        return is_first and failed.append(1) is None

    before = []
    break_steps(monkeypatch, "verify_commit", is_broken)
    grammar = StructuredOutputsParams(regex="[a-z ]{60}")
    params = [greedy(20), SamplingParams(temperature=0, max_tokens=40, structured_outputs=grammar)]
    free, constrained = llm.generate(["You may reproduce and distribute copies of the", "x"], params)
    assert failed
    assert [output.outputs[0].finish_reason for output in (free, constrained)] == ["length", "error"]  # it ran alone


def test_a_prompt_that_always_fails_fails_alone(monkeypatch):
    culprit = CASES[1]["input_ids"]

    def holds_culprit(_slots, _caches, chunk):
        return any(row[: len(culprit)].tolist() == culprit for row in chunk.tokens)

    break_steps(monkeypatch, "prefill", holds_culprit)
    outputs = run(golden_llm(PAIR), [prompt(*case["input_ids"]) for case in CASES], greedy(80))
    assert_others_are_right(outputs, 1, "a cosmic ray")


def test_a_sequence_that_fails_in_mid_text_fails_alone(monkeypatch):
    """Whatever step fails when a text is so long, though many run in it."""
    lengths = [len(case["input_ids"]) for case in CASES]
    culprit = int(np.argmax(lengths))
    limit = lengths[culprit] + 30

    def too_long(slots, *arguments):
        tables = next(argument for argument in arguments if isinstance(argument, Tables))
        rows = np.asarray(tables.rows)
        lengths_of_rows = np.asarray(slots.length)[rows[rows < len(slots.length)]]
        return bool((lengths_of_rows >= limit).any())

    prompts = [prompt(*case["input_ids"]) for case in CASES]
    break_steps(monkeypatch, "greedy_round" if ON_GPU else "verify_commit", too_long)
    params = [greedy(80 if i == culprit else 16) for i in range(len(CASES))]
    outputs = run(golden_llm(PAIR), prompts, params)
    for i, (output, case) in enumerate(zip(outputs, CASES, strict=True)):
        completion = output.outputs[0]
        assert completion.finish_reason == ("error" if i == culprit else "length")
        assert completion.token_ids == case["output_ids"][: len(completion.token_ids)]
    assert len(outputs[culprit].outputs[0].token_ids) >= 16


def test_what_fails_on_the_host_is_one_sequences_affair(monkeypatch):
    take = engine_module.take_emitted

    def failing(sequence, *arguments, **options):
        if sequence.prompt_token_ids == CASES[2]["input_ids"] and len(sequence.output.token_ids) > 20:
            raise ValueError("no such character")
        return take(sequence, *arguments, **options)

    monkeypatch.setattr(engine_module, "take_emitted", failing)
    outputs = run(golden_llm(PAIR), [prompt(*case["input_ids"]) for case in CASES], greedy(80))
    assert_others_are_right(outputs, 2, "ValueError: no such character")


def test_nan_logits_end_the_request_and_spoil_no_page(tmp_path):
    """A token whose embedding is NaN: its keys are in pages that nobody else may take up."""
    folder = tmp_path / "target"
    shutil.copytree(GOLDEN / PAIR / "target", folder)
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
    config_has_head = "lm_head.weight" in tensors
    tensors["lm_head.weight"] = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"].copy())
    tensors["lm_head.weight"][POISON] = 0  # so that nobody drafts it
    tensors["model.embed_tokens.weight"][POISON] = np.nan
    save_file(tensors, file)
    if not config_has_head:
        config = folder / "config.json"
        config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    assert all(POISON not in case["input_ids"] + case["output_ids"] for case in CASES)
    llm = LLM(folder, GOLDEN / PAIR / "draft", dtype="float32", max_num_seqs=2, page_size=4, num_speculative_tokens=15)
    poisoned = prompt(*CASES[0]["input_ids"], POISON, 1, 2, 3, 4, 5)
    prompts = [poisoned, *(prompt(*case["input_ids"]) for case in CASES)]
    for _ in range(2):
        outputs = run(llm, prompts, greedy(80))
        assert outputs[0].outputs[0].finish_reason == "error"
        assert "NaN" in outputs[0].outputs[0].error
        assert outputs[0].outputs[0].token_ids == []
        assert tokens_of(outputs[1:]) == [case["output_ids"] for case in CASES]
    assert outputs[0].metrics.num_cached_tokens == len(CASES[0]["input_ids"]) // 4 * 4  # not those behind the poison


def test_a_grammar_that_breaks_ends_its_request(monkeypatch):
    """Also while it looks at drafts: then it would allow nothing but the end, and the text would look whole."""
    llm = reciter(max_num_seqs=2)
    fill = inputs.fill_masks
    broken = []

    def fill_and_break(batch):
        fill(batch)
        broken.append(1)

    monkeypatch.setattr(inputs, "fill_masks", fill_and_break)
    monkeypatch.setattr(Constraint, "error", property(lambda _: "lexer too large" if len(broken) > 1 else None))
    params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(regex="[a-z]{50}"))
    outputs = run(llm, ["x", "You may reproduce and distribute copies of the"], [params, greedy(20)])
    assert (outputs[0].outputs[0].finish_reason, outputs[0].outputs[0].error) == ("error", "lexer too large")
    assert len(outputs[0].outputs[0].token_ids) == 1  # of the first mask, before it broke
    assert len(outputs[1].outputs[0].token_ids) == 20
