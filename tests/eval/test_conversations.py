"""Prompt styles, and conversations with a model that counts its prompts."""

from types import SimpleNamespace

import pytest

from dflash_jax.base.errors import RequestError
from dflash_jax.base.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dflash_jax.base.values import SamplingParams
from dflash_jax.eval.compare import Sampling, differing, measure_engine
from dflash_jax.eval.conversations import Answer, Run, continued, converse, is_instruct, opening, prompt_of
from dflash_jax.eval.datasets import Sample
from dflash_jax.text.renderer import Renderer
from tests.pairs import RECITER

QUESTION = Sample("q", "def f():", "Write f.", ("And g?",))
TEXT = Sample("t", "import os")


class Tokens:
    """A tokenizer whose tokens are characters, with a chat template that has roles, or one without."""

    def __init__(self, has_roles=True, has_chat_template=True):
        self.has_roles, self.has_chat_template = has_roles, has_chat_template

    def encode(self, text, *, add_special_tokens=True):
        return [ord(c) for c in text]

    def render_chat(self, messages, **_):
        if not self.has_chat_template:
            raise RequestError("no template")
        return "".join(f"<{m['role']}>{m['content']}" if self.has_roles else m["content"] for m in messages)


class Fake(Renderer):
    """The part of `LLM` that `converse` uses; answer i is "[i]", and every prompt is kept as text."""

    def __init__(self, tokenizer):
        self.tokenizer, self.asked, self.calls, self.salts = tokenizer, [], [], []
        self.config = SimpleNamespace(max_num_seqs=1)
        self.frontend, self.engine = self, SimpleNamespace(stats=SimpleNamespace(num_compiles=0))

    def generate(self, prompts, params, *, use_tqdm=False):
        outputs = []
        self.calls.append([p.seed for p in params])
        for prompt in prompts:
            self.salts.append((prompt["cache_salt"], params[0].speculation, params[0].max_tokens))
            outputs.append(answer(f"[{len(self.asked)}]", prompt["prompt_token_ids"]))
            self.asked.append("".join(map(chr, prompt["prompt_token_ids"])))
        return outputs


def answer(text, prompt_token_ids=()):
    completion = CompletionOutput(0, text=text, token_ids=[ord(c) for c in text], finish_reason="stop")
    return RequestOutput("0", None, list(prompt_token_ids), [completion], True, RequestMetrics([1, 1], [3, 3]))


def run_of(fake, samples, style="auto"):
    params = Sampling(8, 5, style).params(0.0, len(samples), speculation=True)
    return converse(fake, samples, params, style=style, salt="s")


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [(Tokens(), True), (Tokens(has_roles=False), False), (Tokens(has_chat_template=False), False), (None, False)],
)
def test_an_instruct_model_is_known_by_its_template(tokenizer, expected):
    assert is_instruct(Fake(tokenizer)) is expected


def test_the_pair_that_recites_is_no_instruct_model():
    assert not is_instruct(Renderer(RECITER / "target"))


def test_styles():
    said = [{"role": "user", "content": "Write f."}]
    assert opening(QUESTION, "auto", instruct=True) == opening(QUESTION, "chat", instruct=False) == said
    assert opening(QUESTION, "auto", instruct=False) == opening(QUESTION, "raw", instruct=True) == "def f():"
    # a text to be continued is asked only with style "chat"
    assert opening(TEXT, "auto", instruct=True) == "import os"
    assert opening(TEXT, "chat", instruct=True) == [{"role": "user", "content": "import os"}]


@pytest.mark.parametrize("style", ["auto", "chat", "raw"])
@pytest.mark.parametrize("prompt", [(1, 2), [{"role": "user", "content": "Hi"}]])
def test_messages_and_token_ids_stay(style, prompt):
    assert opening(Sample("x", prompt), style, instruct=True) == prompt


def test_the_second_turn_follows_the_models_own_answer():
    fake = Fake(Tokens())
    run = run_of(fake, [QUESTION, TEXT, QUESTION])
    assert fake.asked == [
        "<user>Write f.",
        "import os",
        "<user>Write f.",
        "<user>Write f.<assistant>[0]<user>And g?",
        "<user>Write f.<assistant>[2]<user>And g?",
    ]
    assert fake.calls == [[5, 6, 7], [5, 7]]  # one batch for each turn, one seed for each sample
    assert [(a.sample_id, a.turn) for a in run.answers] == [("q", 0), ("t", 0), ("q", 0), ("q", 1), ("q", 1)]
    assert run.num_tokens == 5 * 3  # in both turns
    assert run.tokens_per_second == run.num_tokens / run.seconds


def test_turns_of_a_base_model_are_one_text():
    fake = Fake(Tokens(has_roles=False))
    run_of(fake, [QUESTION])
    assert fake.asked == ["def f():", "def f():[0]\n\nAnd g?"]
    assert continued("a", "b", "c") == "ab\n\nc"


def test_runs_share_no_pages():
    for history in ("a", (97,)):
        prompt = prompt_of(history, Fake(Tokens()), "salt")
        assert (list(prompt["prompt_token_ids"]), prompt["cache_salt"]) == ([97], "salt")


def test_params_are_seeded_and_alike_with_and_without_the_drafter():
    with_it, without = (Sampling(8, 3, "auto").params(1.0, 2, speculation=flag) for flag in (True, False))
    assert with_it == [SamplingParams(temperature=1.0, max_tokens=8, seed=seed) for seed in (3, 4)]
    assert [p.seed for p in without] == [3, 4]
    assert not any(p.speculation for p in without)


def test_answers_are_compared_where_the_prompts_are_the_same():
    def run(*pairs):
        return Run([Answer("q", turn, answer(text, prompt)) for turn, (prompt, text) in enumerate(pairs)], 1.0, 0)

    assert differing(run(("p", "a"), ("q", "b")), run(("p", "a"), ("q", "c"))) == (1, 2)
    assert differing(run(("p", "a"), ("q", "b")), run(("p", "x"), ("r", "y"))) == (1, 1)


def test_with_and_without_the_drafter_take_turns_and_no_run_finds_pages_of_another():
    engine, sampling = Fake(Tokens()), Sampling(99, 0, "auto")
    cells = list(measure_engine(engine, 15, {"data": [TEXT] * 6}, [0.0, 1.0], sampling, plain=True))
    assert [(cell.num_speculative_tokens, cell.temperature) for cell in cells] == [(15, 0), (15, 1)]
    assert [len(run.answers) for cell in cells for run in (cell.run, cell.plain)] == [6] * 4
    measured = [(salt, flag) for salt, flag, tokens in engine.salts if tokens == 99]
    assert [flag for _, flag in measured] == [*[False] * 4, *[True] * 4, *[False] * 2, *[True] * 2] * 2
    assert len({salt for salt, _ in measured}) == len(set(measured)) == 4
    warm_up = {(salt, flag) for salt, flag, tokens in engine.salts if tokens != 99}
    assert warm_up == {("warm-up", True), ("warm-up", False)}


def test_without_plain_decoding_there_is_no_speedup():
    engine, sampling = Fake(Tokens()), Sampling(99, 0, "auto")
    (cell,) = measure_engine(engine, 15, {"data": [TEXT]}, [0.0], sampling, plain=False)
    assert (cell.plain, cell.speedup, cell.differences) == (None, None, None)
