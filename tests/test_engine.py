"""The engine under load: whatever runs beside a request, is preempted, shared or aborted, its answer stays its own."""

import json
import os
from functools import cache
from shutil import copytree

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from safetensors.numpy import load_file, save_file

from dflash_jax import LLM, ConfigError, SamplingParams, StructuredOutputsParams
from tests.pairs import (
    BYTE_VOCABULARY,
    DRAFT,
    EOS,
    HYBRID,
    MASK,
    TARGET,
    assert_empty,
    golden_cases,
    golden_llm,
    greedy,
    in_parts,
    prompt,
    tokens_of,
    write_byte_tokenizer,
    write_model,
)

SIZES = {
    "vocab_size": BYTE_VOCABULARY,
    "num_hidden_layers": 2,
    "num_target_layers": 2,
    "max_position_embeddings": 64,
    "eos_token_id": EOS,
}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
BASES = [list(range(12)), [5] * 9, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [7]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=1, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.2, top_k=5, seed=2, max_tokens=11, min_tokens=4, stop_token_ids=[3, 4]),
    SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=9, n=2, ignore_eos=True),
    SamplingParams(temperature=0, presence_penalty=1.5, repetition_penalty=1.4, max_tokens=17, logprobs=2),
    SamplingParams(temperature=0.9, seed=4, frequency_penalty=0.8, logit_bias={65: 6.0}, max_tokens=12, n=2),
    SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(regex="[ab]{3,9}c"), max_tokens=15),
    SamplingParams(temperature=1.5, seed=5, bad_words=["a", "b b"], allowed_token_ids=[97, 98, 32], max_tokens=10),
    SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=13, ignore_eos=True, speculation=False),
]
# 20 pages of 4 tokens: one sequence of 64 tokens and its look-ahead fits, four do not.
SHAPES = {"max_num_seqs": 4, "page_size": 4, "max_num_batched_tokens": 8}
# Examples of the state machine; DFLASH_TEST_LONG multiplies them.
EXAMPLES = 40 * int(os.environ.get("DFLASH_TEST_LONG", "1"))
NUDGES = 8  # a tie that all of them leave as it is comes once in 256


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Random models over bytes: targets with attention alone, with Gated DeltaNet, and with experts, too; drafters.

    One drafter has a sliding and a full layer, the other full layers alone.
    """
    folder = tmp_path_factory.mktemp("engine")
    raw = DRAFT | SIZES | {"num_hidden_layers": 2, "block_size": 4}
    raw["dflash_config"] = {"target_layer_ids": [0, 1], "mask_token_id": MASK}
    sliding = raw | {"layer_types": [SLIDING, FULL], "sliding_window": 6}
    layers = {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR]}
    hybrid = HYBRID | {"text_config": HYBRID["text_config"] | SIZES | layers}
    sparse = hybrid | {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    sparse["text_config"] = sparse["text_config"] | {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    }
    return {
        "target": write_byte_tokenizer(write_model(folder / "target", TARGET | SIZES, 0)),
        "hybrid": write_byte_tokenizer(write_model(folder / "hybrid", hybrid, 0)),
        "experts": write_byte_tokenizer(write_model(folder / "experts", sparse, 0)),
        "sliding": write_model(folder / "sliding", sliding, 1),
        "full": write_model(folder / "full", raw, 2),
        None: None,
    }


def check(engine):
    engine.scheduler.check_integrity()


@cache
def alone(target):
    """Whoever is alone in an engine without a drafter, without a past."""
    return LLM(target, max_num_seqs=1, enable_prefix_caching=False)


@cache
def nudged(target, seed):
    """An engine as `alone`, with other weights by up to a hundred-thousandth of themselves."""
    tensors, rng = load_file(target / "model.safetensors"), np.random.default_rng(seed)
    folder = copytree(target, target.with_name(f"{target.name}-{seed}"))
    moved = {name: t * (1 + rng.uniform(-1e-5, 1e-5, t.shape)).astype(t.dtype) for name, t in tensors.items()}
    save_file(moved, folder / "model.safetensors")
    return alone(folder)


def answers(request):
    """All that a request says, in a form that can be compared."""
    output = request.output()
    logprobs = [[list(entries) for entries in c.logprobs or ()] for c in output.outputs]
    prompt_logprobs = [entries and list(entries) for entries in output.prompt_logprobs or ()]
    return tokens_of([output]), [c.text for c in output.outputs], logprobs, prompt_logprobs


@cache
def answers_alone(llm, tokens, params):
    """What an engine answers to `PARAMS[params]` of a prompt that runs alone."""
    request = llm.frontend.request(prompt(*tokens), PARAMS[params])
    for _ in llm.engine.run(request.sequences):
        pass
    return answers(request)


def answers_nudged(target, tokens, params):
    """What nudged engines answer, one after another: the first mostly shows a tie."""
    return (answers_alone(nudged(target, seed), tokens, params) for seed in range(NUDGES))


def has_tie(target, tokens, params):
    """Whether two tokens of an answer are so alike that rounding chooses: then weights nudged a little choose, too.

    How a prompt is cut into chunks is enough to choose between logits that differ by 1e-6, with no other request there.
    """
    wanted = answers_alone(alone(target), tokens, params)
    return any(answer != wanted for answer in answers_nudged(target, tokens, params))


def machine_of(target, drafter, **options):
    """A class of state machines over engines of one shape, so that steps are compiled once."""

    class EngineMachine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.llm = LLM(target, drafter, **SHAPES, **options)
            self.engine, self.requests = self.llm.engine, []

        @rule(
            base=st.integers(0, len(BASES) - 1),
            cut=st.integers(1, 20),
            tail=st.lists(st.integers(0, 15), max_size=3),
            params=st.integers(0, len(PARAMS) - 1),
            salt=st.sampled_from([None, "tenant"]),
        )
        def add(self, base, cut, tail, params, salt):
            tokens = (*BASES[base][:cut], *tail)
            salted = prompt(*tokens) | ({"cache_salt": salt} if salt else {})
            request = self.llm.frontend.request(salted, PARAMS[params])
            self.requests.append((tokens, params, request))
            self.engine.add(request.sequences)

        @rule(steps=st.integers(1, 6))
        def step(self, steps):
            for _ in range(steps):
                self.engine.step()
                check(self.engine)

        @rule(index=st.integers(0, 31))  # not drawn from what runs, which depends on how fast programs are compiled
        def abort(self, index):
            running = [r for _, _, request in self.requests for r in request.sequences if not r.finished]
            if running:
                self.engine.abort(running[index % len(running)])

        @invariant()
        def integrity(self):
            check(self.engine)

        def teardown(self):
            while not self.engine.is_idle:
                self.engine.step()
                check(self.engine)
            assert_empty(self.engine)
            for tokens, params, request in self.requests:
                for sequence in request.sequences:
                    assert sequence.finished
                    assert sequence.output.finish_reason != "error", sequence.output.error
                wanted = answers_alone(alone(target), tokens, params)
                assert is_as_alone(request, wanted) or parts_at_a_tie(request, target, tokens, params)

    return EngineMachine


def is_as_alone(request, wanted):
    """Whether a request says all that it says alone, or, aborted, the beginning of it."""
    if not any(s.output.finish_reason == "abort" for s in request.sequences):
        return answers(request) == wanted
    tokens = [s.output.token_ids for s in request.sequences]
    whole = [s.output.finish_reason != "abort" for s in request.sequences]
    return all(
        answer == (all_of_it if done else all_of_it[: len(answer)])
        for answer, all_of_it, done in zip(tokens, wanted[0], whole, strict=True)
    )


def parts_at_a_tie(request, target, tokens, params):
    """Whether an answer has a tie, and is that of the request alone up to where nudged weights part from it."""
    wanted, *_ = answers_alone(alone(target), tokens, params)
    answered = [s.output.token_ids for s in request.sequences]
    return has_tie(target, tokens, params) and all(
        any(
            alike(other[i], all_of_it) <= alike(answer, all_of_it)
            for other, *_ in answers_nudged(target, tokens, params)
        )
        for i, (answer, all_of_it) in enumerate(zip(answered, wanted, strict=True))
        if answer != all_of_it[: len(answer)]
    )


def alike(one, other):
    """How many tokens two answers begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_a_nudge_finds_ties(models):
    """The first two tokens of this answer differ by 1e-6 in log probability; those of the other do not."""
    assert has_tie(models["target"], (3, 1, 4, 1, 5, 9, 2, 4, 4), 0)
    assert not has_tie(models["target"], (*range(12),), 0)


@pytest.mark.parametrize(
    ("target", "drafter", "options"),
    [
        ("target", "sliding", {"kv_cache_memory_bytes": 88_000}),
        pytest.param(
            "target",
            "sliding",
            {"kv_cache_memory_bytes": 88_000, "num_speculative_tokens": 3, "enable_prefix_caching": False},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "target", "full", {"kv_cache_memory_bytes": 104_000, "num_speculative_tokens": 3}, marks=pytest.mark.long
        ),
        ("target", None, {"kv_cache_memory_bytes": 66_667}),
        pytest.param(
            "hybrid",
            "sliding",
            {"kv_cache_memory_bytes": 98_000, "state_cache_fraction": 0.11},
            marks=pytest.mark.long,
        ),
        ("experts", "sliding", {"kv_cache_memory_bytes": 98_000, "state_cache_fraction": 0.11}),
        pytest.param("hybrid", None, {"kv_cache_memory_bytes": 56_000}, marks=pytest.mark.long),
    ],
    ids=["sliding", "sliding-fixed-uncached", "full", "no-drafter", "hybrid", "experts", "hybrid-no-drafter"],
)
def test_every_answer_is_its_own(models, target, drafter, options):
    machine = machine_of(models[target], models[drafter], **options)
    examples = EXAMPLES if drafter == "sliding" and target == "target" and len(options) == 1 else EXAMPLES // 3
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None))


PAIR = "qwen3_swa_tied"


def assert_acceptance(outputs, cases):
    for output, case in zip(outputs, cases, strict=True):
        assert output.outputs[0].token_ids == case["output_ids"]
        lengths = output.metrics.acceptance_lengths
        assert lengths[:-1] == case["acceptance_lengths"][: len(lengths) - 1]


@pytest.mark.parametrize("page_size", [7, *(pytest.param(size, marks=pytest.mark.long) for size in (4, 64))])
def test_acceptance_after_a_prefix_hit(page_size):
    """The pages of a hit hold the drafter's keys too, those of its sliding layers included."""
    cases = golden_cases(PAIR)
    llm = golden_llm(PAIR, page_size=page_size, max_num_seqs=16)  # room for the sliding pages of all four
    prompts = [prompt(*case["input_ids"]) for case in cases]
    assert_acceptance(in_parts(llm, prompts, greedy(80)), cases)
    again = in_parts(llm, prompts, greedy(80))
    assert_acceptance(again, cases)
    hits = [output.metrics.num_cached_tokens for output in again]
    assert hits == [(len(case["input_ids"]) - 1) // page_size * page_size for case in cases]
    salted = in_parts(llm, [p | {"cache_salt": "tenant"} for p in prompts], greedy(80))
    assert_acceptance(salted, cases)
    assert [output.metrics.num_cached_tokens for output in salted] == [0] * len(cases)


def test_acceptance_after_preemption():
    cases = golden_cases(PAIR)
    llm = golden_llm(PAIR, page_size=4, max_num_seqs=2, max_model_len=160, kv_cache_memory_bytes=700_000)
    prompts = [prompt(*case["input_ids"]) for case in cases]
    llm.compile(prompts, greedy(80))  # so that all run side by side from the first round
    outputs = llm.generate(prompts, greedy(80))
    assert llm.engine.scheduler.num_preemptions > 0
    assert tokens_of(outputs) == [case["output_ids"] for case in cases]
    assert_acceptance(outputs, cases)
    assert_empty(llm.engine)


@pytest.mark.parametrize("caching", [True, False])
def test_completions_share_the_pages_of_their_prompt(caching):
    """Also without a prefix cache: then nobody else does."""
    case = golden_cases(PAIR)[3]
    llm = golden_llm(PAIR, page_size=4, enable_prefix_caching=caching, max_num_seqs=4)
    one_prompt, params = prompt(*case["input_ids"]), greedy(30, n=4)
    request = llm.frontend.request(one_prompt, params)
    most_owned = 0
    for _ in llm.engine.run(request.sequences):
        owned = [page for running in llm.engine.scheduler.running for page in running.units[0].ids]
        most_owned = max(most_owned, len(owned) - len(set(owned)))
        check(llm.engine)
    shared = (len(case["input_ids"]) - 1) // 4
    assert most_owned == 3 * shared
    assert [s.output.token_ids for s in request.sequences] == [case["output_ids"][:30]] * 4
    assert [s.num_cached_tokens for s in request.sequences] == [0, *[4 * shared] * 3]
    assert llm.generate(one_prompt, greedy(3))[0].metrics.num_cached_tokens == (4 * shared if caching else 0)


def test_stream_left_early_frees_everything():
    llm = golden_llm(PAIR)
    case = golden_cases(PAIR)[0]
    for output in llm.stream(prompt(*case["input_ids"]), greedy(80)):
        if len(output.outputs[0].token_ids) > 20:
            break
    else:
        pytest.fail("nothing was streamed")
    llm.engine.step()
    assert tokens_of(llm.generate(prompt(*case["input_ids"]), greedy(80))) == [case["output_ids"]]
    while not llm.engine.is_idle:
        llm.engine.step()
    assert_empty(llm.engine)


def test_sliding_pages_stay_bounded(models):
    """However long the text, sliding layers keep their window and the look-ahead."""
    llm = LLM(models["target"], models["sliding"], max_num_seqs=1, page_size=4)
    engine, kept = llm.engine, []
    for _ in llm.stream(prompt(*[2] * 20), greedy(40)):
        kept += [len(r.units[1].ids) for r in engine.scheduler.running]
        check(engine)
    assert max(kept) <= engine.layout.groups[1].num_units <= 7


@pytest.mark.long
def test_a_prompt_of_20000_tokens(tmp_path):
    """A window of 64: the sliding group keeps a handful of pages, whatever the prompt; nothing leaks."""
    small = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 20_480}
    target = TARGET | small | {"num_hidden_layers": 1}
    raw = DRAFT | small | {"num_target_layers": 1, "layer_types": [SLIDING, FULL], "sliding_window": 64}
    raw["dflash_config"] = {"target_layer_ids": [0], "mask_token_id": 60}
    folders = write_model(tmp_path / "target", target, 0), write_model(tmp_path / "draft", raw, 1)
    one_prompt = prompt(*[(7 * i + i // 5) % 60 for i in range(20_000)])
    llm = LLM(*folders, max_num_seqs=1, max_num_batched_tokens=2048, num_speculative_tokens=5)
    kept, outputs = [], []
    for output in llm.stream(one_prompt, greedy(24)):
        outputs.append(output)
        kept += [len(r.units[1].ids) for r in llm.engine.scheduler.running if r.is_prefilled]
        check(llm.engine)
    assert max(kept) <= llm.engine.layout.groups[1].num_units == 3
    plain = LLM(folders[0], max_num_seqs=1, max_num_batched_tokens=2048)
    assert tokens_of(outputs[-1:]) == tokens_of(plain.generate(one_prompt, greedy(24)))
    while not llm.engine.is_idle:
        llm.engine.step()
    assert_empty(llm.engine)


def test_too_little_memory_for_one_sequence(models):
    with pytest.raises(ConfigError, match=r"max_model_len=64.*kv_cache_memory_bytes"):
        LLM(models["target"], models["sliding"], kv_cache_memory_bytes=10_000)


def test_structured_outputs_through_the_engine(models):
    """In one batch with others, with a drafter whose blocks know nothing of grammars."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},  # a random model would be lost in white space
    }
    params = [
        SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(json=schema)),
        SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])),
        greedy(20),
    ]
    prompts = [prompt(1, 2, 3)] * 3
    options = SHAPES | {"kv_cache_memory_bytes": 88_000}  # those of machines above, whose programs serve here too
    outputs = LLM(models["target"], models["sliding"], num_speculative_tokens=3, **options).generate(prompts, params)
    options["kv_cache_memory_bytes"] = 66_667
    assert tokens_of(outputs) == tokens_of(LLM(models["target"], **options).generate(prompts, params))
    assert json.loads(outputs[0].outputs[0].text).keys() == {"a", "b"}
    assert outputs[1].outputs[0].text in ("yes", "no")
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "stop", "length"]
