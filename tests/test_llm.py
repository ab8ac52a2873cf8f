"""The Python API: texts, chats, streams, several completions, log-probabilities, and requests that cannot be served."""

import json
import math
from itertools import pairwise

import jax
import numpy as np
import pytest

from dflash_jax import LLM, ConfigError, RequestError, SamplingParams, generate
from dflash_jax.engine.device import budget, steps
from tests.conftest import ON_GPU
from tests.pairs import (
    BYTE_VOCABULARY,
    DRAFT,
    EOS,
    GOLDEN,
    MASK,
    TARGET,
    empty_cache,
    golden_cases,
    golden_llm,
    greedy,
    prompt,
    tokens_of,
    write_byte_tokenizer,
    write_model,
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A random pair over bytes."""
    folder = tmp_path_factory.mktemp("pair")
    sizes = {"vocab_size": BYTE_VOCABULARY, "eos_token_id": EOS, "num_hidden_layers": 2, "num_target_layers": 2}
    target = write_byte_tokenizer(write_model(folder / "target", TARGET | sizes, 0))
    (target / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": [EOS, 7]})
    )
    raw = DRAFT | sizes | {"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": MASK}}
    options = {"max_model_len": 128, "num_speculative_tokens": 5, "max_num_seqs": 2}
    return LLM(target, write_model(folder / "draft", raw, 1), **options)


@pytest.fixture(scope="module")
def golden():
    return golden_llm("qwen3_swa_tied")


def test_text_in_text_out(llm):
    outputs = llm.generate(["Hello", "Wörld"], greedy(20))
    for text, output in zip(["Hello", "Wörld"], outputs, strict=True):
        assert output.prompt == text
        assert output.prompt_token_ids == llm.tokenizer.encode(text)
        completion = output.outputs[0]
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
        assert (output.finished, completion.finish_reason, completion.index) == (True, "length", 0)
        assert output.metrics.first_token_time <= output.metrics.finished_time
    assert outputs[0].request_id != outputs[1].request_id


def test_one_prompt_without_a_list(llm):
    ids = llm.tokenizer.encode("Hello")
    by_text, by_ids = llm.generate("Hello", greedy(5)), llm.generate({"prompt_token_ids": np.array(ids)}, greedy(5))
    assert tokens_of(by_text) == tokens_of(by_ids)
    assert by_ids[0].prompt is None


def test_chat(llm):
    messages = [{"role": "user", "content": "Hi"}]
    output = llm.chat(messages, greedy(4))[0]
    assert llm.tokenizer.decode(output.prompt_token_ids) == "<user>Hi<assistant>"
    two = llm.chat([messages, messages], greedy(4), chat_template_kwargs={"name": "bot"})
    assert [llm.tokenizer.decode(o.prompt_token_ids) for o in two] == ["<user>Hi<bot>"] * 2
    bare = llm.chat(messages, greedy(4), chat_template="{{ messages[0].content }}", add_generation_prompt=False)
    assert llm.tokenizer.decode(bare[0].prompt_token_ids) == "Hi"


@pytest.mark.parametrize("messages", [[], [{"content": "Hi"}]])
def test_chat_that_the_template_refuses(llm, messages):
    with pytest.raises(RequestError, match=r"messages|role"):
        llm.chat(messages, greedy(4))


def test_generation_config_gives_the_defaults(llm):
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=20)
    assert llm.frontend.eos_token_ids == (EOS, 7)
    assert len(llm.generate("x")[0].outputs[0].token_ids) <= 16


def test_stream_grows_into_the_list(golden):
    cases = [prompt(*case["input_ids"]) for case in golden_cases("qwen3_swa_tied")[:2]]
    seen: dict[str, list] = {}
    for output in golden.stream(cases, greedy(40)):
        seen.setdefault(output.request_id, []).append(output)
    finals = [outputs[-1] for outputs in seen.values()]
    assert tokens_of(finals) == tokens_of(golden.generate(cases, greedy(40)))
    for outputs in seen.values():
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        tokens = [o.outputs[0].token_ids for o in outputs]
        assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(tokens))
        assert len(tokens[0]) == 1  # the prefill's token is not held back for a round


def test_callers_take_turns(golden):
    """Two streams side by side, and a batch while a stream pauses."""
    first, second = (prompt(*case["input_ids"]) for case in golden_cases("qwen3_swa_tied")[:2])
    expected = tokens_of(golden.generate([first, second], greedy(40)))
    pairs = list(zip(golden.stream(first, greedy(40)), golden.stream(second, greedy(40)), strict=False))
    assert len(pairs) > 2
    stream = golden.stream(first, greedy(40))
    next(stream)
    assert tokens_of(golden.generate(second, greedy(40))) == expected[1:]
    assert tokens_of([list(stream)[-1]]) == expected[:1]
    last = dict(enumerate(golden.stream(first, greedy(40))))  # nothing of those that were left is in the way
    assert tokens_of([list(last.values())[-1]]) == expected[:1]


def test_several_completions(llm):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=10, ignore_eos=True)
    output = llm.generate("abc", params)[0]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len(set(map(tuple, tokens_of([output])))) == 3
    second = SamplingParams(temperature=1.0, seed=6, max_tokens=10, ignore_eos=True)
    assert tokens_of(llm.generate("abc", second))[0] == output.outputs[1].token_ids
    rounds = output.metrics.acceptance_lengths
    assert sum(rounds) + 3 == 30
    assert output.metrics.mean_acceptance_length == pytest.approx(27 / len(rounds))


def test_more_requests_than_slots(golden):
    cases = golden_cases("qwen3_swa_tied")
    assert golden.config.max_num_seqs < 7
    outputs = golden.generate([prompt(*cases[i % 4]["input_ids"]) for i in range(7)], greedy(80))
    assert tokens_of(outputs) == [cases[i % 4]["output_ids"] for i in range(7)]


def test_lengths_and_parameters_side_by_side(golden):
    case = golden_cases("qwen3_swa_tied")[1]
    params = [greedy(n) for n in (1, 2, 17, 80)]
    outputs = golden.generate([prompt(*case["input_ids"])] * 4, params)
    assert tokens_of(outputs) == [case["output_ids"][:n] for n in (1, 2, 17, 80)]
    assert outputs[0].metrics.acceptance_lengths == []
    assert math.isnan(outputs[0].metrics.mean_acceptance_length)


def test_up_to_the_last_position():
    """The look-ahead of the last block lies beyond max_model_len and must overwrite nothing."""
    case = golden_cases("qwen3_swa_tied")[0]
    llm = golden_llm("qwen3_swa_tied", max_model_len=60)
    output = llm.generate(prompt(*case["input_ids"]), greedy(80))[0]
    assert output.outputs[0].token_ids == case["output_ids"][:59]
    assert output.outputs[0].finish_reason == "length"
    unlimited = llm.generate(
        prompt(*case["input_ids"]), SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    )
    assert tokens_of(unlimited) == [case["output_ids"][:59]]


def test_stop_and_eos_of_the_golden_text(golden):
    case = golden_cases("qwen3_swa_tied")[2]  # emits 1, the end-of-sequence token, as its 70th
    ids = case["output_ids"]
    end = ids.index(1)
    params = [
        SamplingParams(temperature=0, max_tokens=80),
        SamplingParams(temperature=0, max_tokens=80, stop_token_ids=[ids[20]]),
    ]
    by_eos, by_id = (o.outputs[0] for o in golden.generate([prompt(*case["input_ids"])] * 2, params))
    assert (by_eos.token_ids, by_eos.finish_reason, by_eos.stop_reason) == (ids[: end + 1], "stop", None)
    assert by_id.token_ids == ids[: ids.index(ids[20]) + 1]
    assert by_id.stop_reason == ids[20]
    assert golden.engine.is_idle  # the round that had run ahead was read, too


@pytest.mark.parametrize("drafter", [True, False])
def test_logprobs(drafter):
    llm = golden_llm("qwen3_full", drafter=drafter)
    case = golden_cases("qwen3_full")[0]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True, logprobs=3)
    output = llm.generate([prompt(*case["input_ids"])] * 2, [params, greedy(24)])
    completion = output[0].outputs[0]
    assert output[1].outputs[0].logprobs is None
    assert len(completion.logprobs) == 24
    # against the target alone, run over the finished text
    tokens = case["input_ids"] + completion.token_ids
    engine = llm.engine
    target, _ = steps.bind(engine.runner.params, engine.spec)

    @jax.jit
    def over(tokens):
        positions = jax.numpy.arange(tokens.shape[1])[None]
        hidden, _, _ = target(tokens, positions, empty_cache(engine.target.config, tokens.shape[1]))
        return jax.nn.log_softmax(target.logits(hidden)[0])

    expected = np.asarray(over(jax.numpy.array([tokens])))
    start, total = len(case["input_ids"]) - 1, 0.0
    for i, (token, entries) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        row = expected[start + i]
        total += row[token]
        best = np.argsort(-row)[:3].tolist()
        assert set(entries) == {*best, token}
        for entry, found in entries.items():
            assert found.logprob == pytest.approx(row[entry], abs=1e-4)
            assert found.rank == 1 + (row > row[entry]).sum()
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_logprobs_carry_text(llm):
    entries = llm.generate("a", greedy(1, logprobs=2))[0].outputs[0].logprobs[0]
    assert all(entry.decoded_token == llm.tokenizer.decode([token]) for token, entry in entries.items())


def test_min_tokens_delays_the_end(golden):
    case = golden_cases("qwen3_swa_tied")[2]
    params = SamplingParams(temperature=0, max_tokens=80, min_tokens=75)
    plain = golden_llm("qwen3_swa_tied", drafter=False)
    with_drafter, without = (m.generate(prompt(*case["input_ids"]), params) for m in (golden, plain))
    assert tokens_of(with_drafter) == tokens_of(without)
    assert len(tokens_of(with_drafter)[0]) >= 75
    assert 1 not in tokens_of(with_drafter)[0][:75]


# --- requests that cannot be served


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"prompt_token_ids": []}, ["empty"]),
        ("", ["empty"]),
        ({"prompt_token_ids": [3, BYTE_VOCABULARY]}, [str(BYTE_VOCABULARY), "0 to 257"]),
        ({"prompt_token_ids": [-1]}, ["-1"]),
        ({"prompt_token_ids": [1.5]}, ["1.5"]),
        ({"prompt_token_ids": [1] * 128}, ["128 tokens", "max_model_len=128"]),
        ({"text": "x"}, ["dict", "prompt_token_ids"]),
        (7, ["int"]),
        ({"prompt_token_ids": None}, ["NoneType"]),
        ({"prompt_token_ids": b"ab"}, ["bytes"]),
        ("\ud800", ["Unicode"]),
    ],
)
def test_bad_prompts_run_nothing(llm, bad, words):
    with pytest.raises(RequestError) as error:
        llm.generate(["fine", bad], greedy(3))
    for word in ["prompt 1", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"n": 0}, "n=0"),
        ({"n": 10**7}, "n=10000000 .*16384"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_p": 0}, "top_p=0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_k": -2}, "top_k=-2"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"min_tokens": 9, "max_tokens": 8}, "max_tokens=8"),
        ({"logprobs": -1}, "logprobs=-1"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": 2**63}, "64 bits"),
        ({"stop": [""]}, "stop="),
        ({"stop_token_ids": [-3]}, "stop_token_ids="),
        ({"stop": 5}, "stop="),
        ({"ignore_eos": "no"}, "ignore_eos='no'"),
    ],
)
def test_bad_sampling_params(changes, word):
    with pytest.raises(RequestError, match=word):
        SamplingParams(**changes)


def test_parameters_that_do_not_fit_the_model(llm, golden):
    for params, word in [
        (SamplingParams(stop_token_ids=[BYTE_VOCABULARY]), "stop_token_ids"),
        ([SamplingParams()] * 3, "3 sampling_params for 1 prompts"),
        ({"temperature": 0}, "sampling_params of type dict"),
        ([None], "sampling_params of type NoneType"),
    ]:
        with pytest.raises(RequestError, match=word):
            llm.generate("x", params)
    for call, word in [
        (lambda: golden.generate("text", greedy(2)), "tokenizer"),
        (lambda: golden.generate(prompt(1), SamplingParams(stop="x")), "stop_token_ids"),
        (lambda: golden.chat([{"role": "user", "content": "x"}]), "tokenizer"),
    ]:
        with pytest.raises(RequestError, match=word):
            call()


@pytest.mark.parametrize("bad", [None, 5, b"text"])
def test_prompts_that_are_none(llm, bad):
    with pytest.raises(RequestError, match=f"prompt 0: a prompt of type {type(bad).__name__}"):
        llm.generate(bad, greedy(2))


def test_parameters_beyond_the_range_of_the_device(llm):
    """What no int32 or float32 holds means the same as the largest that it holds."""
    for extreme, same in [
        ({"top_k": 10**12}, {"top_k": 0}),
        ({"temperature": 1e39, "min_tokens": 3}, {"temperature": 1e30, "min_tokens": 3}),
        ({"temperature": 2e-38}, {"temperature": 0}),
        ({"min_tokens": 10**12, "max_tokens": None}, {"min_tokens": 128, "max_tokens": None}),
        ({"stop_token_ids": np.array([1, 2])}, {"stop_token_ids": [1, 2]}),
        ({"stop_token_ids": 5}, {"stop_token_ids": [5]}),
    ]:
        first, second = (
            llm.generate("abc", SamplingParams(**({"max_tokens": 12, "seed": 1} | changes)))
            for changes in (extreme, same)
        )
        assert tokens_of(first) == tokens_of(second)


def test_defaults_that_cannot_be_used(llm, monkeypatch):
    monkeypatch.setattr(llm.frontend, "generation_config", {"temperature": "hot"})
    with pytest.raises(ConfigError, match=r"generation_config\.json: temperature='hot'"):
        llm.generate("x")
    llm.generate("x", greedy(1))  # they do not matter to who brings parameters


def test_prompts_from_a_generator(llm):
    assert len(llm.generate((text for text in "ab"), greedy(2))) == 2


def test_mismatched_drafter_loads_nothing():
    with pytest.raises(ConfigError, match=r"draft.config\.json.*hidden_size=64.*96"):
        LLM(GOLDEN / "qwen3_swa_tied" / "target", GOLDEN / "qwen3_full" / "draft")


def test_more_devices_than_there_are():
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=8.*4"):
        golden_llm("qwen3_full", tensor_parallel_size=8)


# --- the command

QUESTION = "what are prompt_token_ids?"


def test_command_compares_with_plain_decoding(golden, monkeypatch, capsys):
    monkeypatch.setattr("dflash_jax.loading.LLM", lambda *args, **options: golden)
    ids = ",".join(map(str, golden_cases("qwen3_swa_tied")[0]["input_ids"]))
    command = ["--compare", "--prompt-token-ids", ids, "--max-tokens", "9", "--ignore-eos"]
    runs = []
    monkeypatch.setattr(
        golden, "stream", lambda prompt, params: runs.append(params) or LLM.stream(golden, prompt, params)
    )
    assert generate.main(command) == 0
    shown = capsys.readouterr()
    assert [params.speculation for params in runs] == [True, False]
    assert len(shown.out.split()) == 9
    assert "times plain decoding, which made the same tokens at" in shown.err


def test_a_run_that_compiled_says_so(golden):
    output = golden.generate(prompt(1, 2, 3), greedy(4))[0]
    assert "compiled" not in generate.summary(generate.Run(output, 0), None, block=16)
    assert "3 programs were compiled" in generate.summary(generate.Run(output, 2), generate.Run(output, 1), block=16)


@pytest.mark.parametrize("arguments", [["--chat"], []])
def test_command_prints_text_for_text(llm, monkeypatch, capsys, arguments):
    monkeypatch.setattr("dflash_jax.loading.LLM", lambda *args, **options: llm)
    assert generate.main([*arguments, "--prompt", QUESTION, "--max-tokens", "6", "--ignore-eos"]) == 0
    chat = [{"role": "user", "content": QUESTION}]
    expected = llm.chat(chat, greedy(6)) if arguments else llm.generate(QUESTION, greedy(6))
    assert capsys.readouterr().out == expected[0].outputs[0].text + "\n"


@pytest.mark.skipif(ON_GPU, reason="a GPU has memory of its own")
def test_a_model_that_the_machine_cannot_hold_is_not_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr("dflash_jax.frontend.load_params", None)
    monkeypatch.setattr(budget, "machine_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"^the parameters of /.* take .* GB in float32 and this machine has .* GB"):
        LLM(write_model(tmp_path, TARGET, 0))
