"""What formats cost: the rounding of weights, the measures on a pair whose answers are known, and the table."""

from types import SimpleNamespace

import format_quality
import jax.numpy as jnp
import numpy as np
import pytest
import weight_formats
from format_quality import CUE, DEPTHS, Format, Scored, Sizes
from rounded_weights import ROUNDING, widened, write_rounded

from dflash_jax.spec import target_config
from dflash_jax.weights.export import dense_params
from dflash_jax.weights.loader import load_params
from dflash_jax.weights.parameters import checkpoint_tensors
from tests.pairs import HYBRID, RECITER, reciter, write_model


def tensors_of(folder, config):
    params = load_params(folder, config, jnp.float32, keep_quantized=False)
    return checkpoint_tensors(config, dense_params(config, params))


@pytest.mark.parametrize(("weights", "error"), [("fp8", 2**-4), ("int4", 1 / 28)])
def test_every_matrix_of_a_layer_is_rounded_and_nothing_else(tmp_path, weights, error):
    """To within half a step: of e4m3's own size, or a fifteenth of a group's range."""
    config = target_config(HYBRID)
    source = write_model(tmp_path / "source", HYBRID, seed=1)
    count = write_rounded(source, tmp_path / "rounded", weights)
    before, after = (tensors_of(tmp_path / name, config) for name in ("source", "rounded"))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    # q, k, v and o of one layer, qkv, z and out of four, gate, up and down of five.
    assert len(changed) == count == 4 + 4 * 3 + 5 * 3
    assert not any(part in name for name in changed for part in ("norm", "conv", "in_proj_a", "embed", "lm_head"))
    for name in changed:
        width = np.abs(before[name]) if weights == "fp8" else np.ptp(before[name], axis=1, keepdims=True)
        small = np.abs(before[name]).max() * 2**-9  # where e4m3 has steps of one size
        assert np.all(np.abs(after[name] - before[name]) <= width * error + small)


def test_widened_numbers_are_those_of_the_packed_matrix():
    weight = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    for rounding in ROUNDING.values():
        matrix = rounding(weight)
        assert np.abs(widened(matrix) - weight).max() < 0.5
        assert len(set(widened(matrix)[1, :128].tolist())) <= (16 if matrix.zeros is not None else 256)


LICENCE = (RECITER.parents[1] / "LICENSE").read_text()
SMALL = Sizes(texts=2, copies=1, needles=1, context=300, prompts=2, tokens=48, length=400)


@pytest.fixture(scope="module")
def figures():
    """What is measured of the pair that recites the licence, where problems and answers are parts of it."""
    head, rest = LICENCE[:3000], LICENCE[3000:6000]
    texts = [(head[:600], head[600:1800]), (rest[:600], rest[600:1800])]
    samples = [SimpleNamespace(id=str(i), prompt=text, question=None) for i, (text, _) in enumerate(texts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format_quality, "solutions", lambda: [*texts, (LICENCE, "")])
        patch.setattr(format_quality, "reference_answers", lambda: [(first, second[::-1]) for first, second in texts])
        patch.setattr(format_quality, "humaneval", lambda: samples)
        patch.setattr(format_quality, "mt_bench", lambda: samples)
        patch.setattr(format_quality, "BACK", 40)
        patch.setattr(format_quality, "COPIED", 20)
        llm = reciter(max_num_seqs=2, compile_at_start=False)
        return format_quality.measure(llm, SMALL)


def test_what_is_known_by_heart_has_a_low_perplexity(figures):
    measured, _ = figures
    assert 1 <= measured["humaneval"]["perplexity"] < 1.5
    assert measured["mt_bench"]["perplexity"] > 20  # backwards
    assert measured["copy"]["share_of_tokens"] > 0.9
    assert measured["needle"]["right"] == 0  # its layers see 32 tokens
    assert measured["needle"]["asked"] == len(DEPTHS)


def test_rounds_are_counted_by_prompt(figures):
    _, lengths = figures
    assert len(lengths) == 2 * SMALL.prompts
    assert all(sum(rounds) == SMALL.tokens - 1 for rounds in lengths)  # a prefill emits the first
    assert format_quality.compared(lengths, lengths)["tokens_a_round"] > 3


class Copier:
    """An engine that says what stands behind the last place in its prompt that its end was at, if `is_right`."""

    tokenizer = SimpleNamespace(encode=lambda text: [ord(char) for char in text])

    def __init__(self, is_right=lambda prompt, place: True):
        self.is_right = is_right

    def generate(self, prompts, params, use_tqdm):
        shared = params if isinstance(params, list) else [params] * len(prompts)
        return [self.answer(p["prompt_token_ids"], each) for p, each in zip(prompts, shared, strict=True)]

    def answer(self, ids, params):
        if params.prompt_logprobs is None:
            text = "".join(map(chr, ids))
            place = text.rindex(text[-12:], 0, -1) + 12
            token_ids = ids[place : place + params.max_tokens] if self.is_right(ids, place) else [0]
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=token_ids)])
        ranks = [1 if i >= 12 and self.follows(ids, i) else 7 for i in range(len(ids))]
        entries = [{token: SimpleNamespace(rank=rank)} for token, rank in zip(ids, ranks, strict=True)]
        return SimpleNamespace(prompt_logprobs=entries)

    def follows(self, ids, i):
        text = "".join(map(chr, ids))
        place = text.find(text[i - 12 : i])
        return place < i - 12 and text[place + 12] == text[i]


def test_needles_lie_at_their_depths():
    tokens = list(range(5000, 7000))
    engine = Copier(is_right=lambda prompt, place: place < len(prompt) / 2 - 60)
    measured = format_quality.needles(engine, tokens, count=2, context=1000)
    assert measured["right_by_depth"] == {"0.1": 2, "0.3": 2, "0.5": 0, "0.7": 0, "0.9": 0}
    assert (measured["asked"], measured["right"]) == (10, 4)
    assert format_quality.needles(Copier(), tokens, count=2, context=1000)["right"] == 10


def test_copies_come_from_as_far_back_as_is_said():
    tokens = np.random.default_rng(0).integers(100, 999, 5000).tolist()
    measured = format_quality.copies(Copier(), tokens, 3)
    assert (measured["texts"], measured["exact"], measured["share_of_tokens"]) == (3, 3, 1)
    engine = Copier()
    engine.follows = lambda ids, i: ids[i] == ids[i - format_quality.BACK] and i % 10 > 0
    measured = format_quality.copies(engine, tokens, 3)
    assert measured["exact"] == 0
    assert measured["share_of_tokens"] == pytest.approx(0.9, abs=0.01)
    assert CUE >= 12


def test_only_what_follows_the_first_part_is_scored():
    engine = Copier()
    engine.follows = lambda ids, i: i >= 20
    (scored,) = format_quality.entries(engine, [Scored(list(range(50)), 20)])
    assert [entry.rank for entry in scored] == [1] * 30


def test_differences_are_taken_by_prompt():
    figures = format_quality.compared([[2, 4], [1, 1, 4]], [[3, 3], [1, 1]])
    assert figures == {"rounds": 5, "tokens_a_round": 2.4, "difference": 0.5, "standard_error": 0.5}


def test_the_table_compares_with_the_first_format():
    def row(form, value, accepted):
        scores = {name: {"tokens": 9, "perplexity": value} for name in ("humaneval", "mt_bench")}
        copy = {"texts": 4, "exact": 3, "share_of_tokens": 0.995}
        return {**form._asdict(), **scores, "copy": copy, "needle": {"asked": 20, "right": 19}, **accepted}

    forms = format_quality.formats_of(["int4"], ["bfloat16", "int4_had"])
    assert forms == [Format("as stored", "bfloat16"), Format("as stored", "int4_had"), Format("int4", "bfloat16")]
    accepted = {"acceptance": {"rounds": 9, "tokens_a_round": 2.5, "difference": -0.25, "standard_error": 0.1}}
    _, _, first, second = format_quality.table([row(forms[0], 4.0, accepted), row(forms[2], 4.1, {})]).splitlines()
    copied = "3 of 4, 99.5 % of tokens | 19 of 20"
    assert first == f"| as stored | `bfloat16` | 4.0 (+0.0 %) | 4.0 (+0.0 %) | {copied} | 2.50 | -0.25 ± 0.10 |"
    assert second == f"| int4 | `bfloat16` | 4.1 (+2.5 %) | 4.1 (+2.5 %) | {copied} |  |  |"


@pytest.mark.parametrize("arguments", [["--model", "nowhere", "--out", "out.json"], ["nowhere"]])
def test_a_model_that_is_not_there_is_told_in_a_sentence(capsys, arguments):
    script = format_quality if "--model" in arguments else weight_formats
    assert script.main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: nowhere is not a folder")
