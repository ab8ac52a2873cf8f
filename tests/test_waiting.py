"""Who waits for a program: those that need it and nobody else, and no longer than it takes to compile."""

import threading
import time

import pytest

from dflash_jax import SamplingParams
from dflash_jax.engine.device.shapes import Load, Shapes
from dflash_jax.engine.programs.program import Program
from dflash_jax.engine.programs.store import MapLimit, Programs, programs
from dflash_jax.parallel.mesh import Mesh
from tests.conftest import drop_programs
from tests.pairs import golden_cases, golden_llm, greedy, prompt, tokens_of

PAIR = "qwen3_swa_tied"
CASES = golden_cases(PAIR)


class Gate:
    """Lets some programs be compiled only once it is open."""

    def __init__(self, monkeypatch, is_held):
        self.opened, self.held = threading.Event(), []
        build = Programs._build

        def gated(store, program, lowered=None, **options):
            if is_held(program.label) and not self.opened.is_set():
                self.held.append(program.label)
                assert self.opened.wait(120)
            return build(store, program, lowered, **options)

        monkeypatch.setattr(Programs, "_build", gated)


@pytest.fixture(autouse=True)
def fresh():
    """Nothing that was compiled before is found, and nothing that is compiled here is left half done."""
    drop_programs()
    yield
    drop_programs()


@pytest.fixture
def hold(monkeypatch, fresh):
    """Makes gates, and opens them at the end whatever has happened."""
    gates = []
    yield lambda is_held: gates.append(Gate(monkeypatch, is_held)) or gates[-1]
    for gate in gates:
        gate.opened.set()


def request(llm, case, max_tokens=80, **options):
    made = llm.frontend.request(prompt(*case["input_ids"]), greedy(max_tokens, **options))
    llm.engine.add(made.sequences)
    return made.sequences[0]


def step_until(llm, is_done, seconds=120):
    """Steps until something is so; returns how many it took."""
    began, steps = time.monotonic(), 0
    while not is_done():
        assert time.monotonic() - began < seconds
        llm.engine.step()
        steps += 1
    return steps


def test_a_stream_goes_on_while_another_waits_for_its_programs(monkeypatch, hold):
    """The other's sampling mode has programs of its own, as on accelerators."""
    monkeypatch.setattr(Mesh, "is_cpu", False)
    llm = golden_llm(PAIR, max_num_seqs=4)
    llm.compile(prompt(*CASES[3]["input_ids"]), greedy(80, speculation=False))
    gate = hold(lambda label: "(reported)" in label)
    first = request(llm, CASES[3], speculation=False)
    step_until(llm, lambda: len(first.output.token_ids) > 5)
    second = request(llm, CASES[1], logprobs=1)
    step_until(llm, lambda: first.finished)
    assert gate.held
    assert first.output.token_ids == CASES[3]["output_ids"]
    assert not second.finished
    gate.opened.set()
    step_until(llm, lambda: second.finished)
    assert second.output.token_ids == CASES[1]["output_ids"]


def test_sequences_take_turns_where_no_program_takes_all(hold):
    """None stands still until those before it have ended."""
    llm = golden_llm(PAIR, max_num_seqs=4)
    for case in CASES[:3]:
        llm.compile(prompt(*case["input_ids"]), greedy(80, speculation=False))
    gate = hold(lambda label: "of 2 sequences" in label or "of 4 sequences" in label)
    some = [request(llm, case, speculation=False) for case in CASES[:3]]
    step_until(llm, lambda: all(sequence.output.token_ids for sequence in some))
    counts = [len(sequence.output.token_ids) for sequence in some]
    for _ in range(30):
        llm.engine.step()
    gained = [len(s.output.token_ids) - count for s, count in zip(some, counts, strict=True)]
    assert gate.held
    assert all(9 <= tokens <= 11 for tokens in gained)
    gate.opened.set()
    step_until(llm, lambda: all(sequence.finished for sequence in some))
    assert [s.output.token_ids for s in some] == [case["output_ids"] for case in CASES[:3]]


def test_who_comes_later_waits_for_a_turn(hold):
    """A stream advances between the first rounds of those that come while it runs."""
    llm = golden_llm(PAIR, max_num_seqs=8)
    for case in CASES[:2]:
        llm.compile(prompt(*case["input_ids"]), greedy(80, speculation=False))
    hold(lambda label: "sequences" in label)
    stream = request(llm, CASES[0], speculation=False)
    step_until(llm, lambda: len(stream.output.token_ids) > 5)
    others = [request(llm, CASES[1], 8, speculation=False) for _ in range(6)]
    order = []
    while not all(len(other.output.token_ids) > 1 for other in others):
        before = [len(sequence.output.token_ids) for sequence in (stream, *others)]
        llm.engine.step()
        rounds = enumerate((stream, *others))  # a first token comes of the prefill
        order += [i for i, s in rounds if len(s.output.token_ids) > max(1, before[i])]
    assert order.count(0) >= 3  # once, where all who came went first


def test_a_prompt_is_prefilled_by_what_there_is(hold):
    """Rather in some chunks that are compiled than in one that is not."""
    llm = golden_llm(PAIR, enable_prefix_caching=False, max_num_seqs=4)
    gate = hold(lambda label: "x 256 tokens" in label)
    case = {"input_ids": [*CASES[3]["input_ids"], *CASES[2]["input_ids"], *CASES[3]["input_ids"]]}
    assert 128 < len(case["input_ids"]) <= 256
    sequence = request(llm, case, 20)
    step_until(llm, lambda: sequence.finished)
    assert [label.split(" with")[0] for label in gate.held] == ["prefill of 1 sequence x 256 tokens"]
    gate.opened.set()
    llm.engine.runner.finish_compiling()
    again = request(llm, case, 20)
    step_until(llm, lambda: again.finished)
    assert again.output.token_ids == sequence.output.token_ids


def test_a_batch_shrinks_into_rows_that_are_compiled(hold):
    """When others end, what is left goes on with rows to spare until its own program is there."""
    llm = golden_llm(PAIR, max_num_seqs=2)
    llm.engine.compile(Load(2, frozenset({64}), 200))
    ready = programs()
    for program in ready._programs.values():
        if (
            "of 1 sequence" in program.label
            and "prefill" not in program.label
            and "commit of 1 sequence x 1" not in program.label
        ):
            program.executable = None
    gate = hold(lambda label: "of 1 sequence" in label)
    some = [request(llm, case, n) for case, n in zip(CASES[:2], (80, 4), strict=True)]
    step_until(llm, lambda: all(sequence.finished for sequence in some))
    assert [s.output.token_ids for s in some] == [CASES[0]["output_ids"], CASES[1]["output_ids"][:4]]
    step_until(llm, lambda: any("of 1 sequence" in label for label in gate.held))  # others may be compiled before it
    gate.opened.set()


def test_what_cannot_be_compiled_ends_none_that_can_do_without(monkeypatch):
    lower = Program.lower

    def failing(program):
        if "of 2 sequences" in program.label:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return lower(program)

    monkeypatch.setattr(Program, "lower", failing)
    llm = golden_llm(PAIR, max_num_seqs=2)
    outputs = llm.generate([prompt(*case["input_ids"]) for case in CASES[:2]], greedy(40))
    for output, case in zip(outputs, CASES, strict=False):
        assert output.outputs[0].finish_reason in ("length", "error")
        if output.outputs[0].finish_reason == "length":
            assert output.outputs[0].token_ids == case["output_ids"][:40]
        else:
            assert "out of memory" in output.outputs[0].error


class FewMaps(MapLimit):
    """A process with so few maps that little more than the programs of one round fit."""

    def __init__(self, store, number):
        super().__init__(2 * (number + 1) * 1024)
        self.store = store

    def count(self):
        return 1024 * self.store.num_compiled


def test_an_engine_goes_on_where_few_programs_fit(monkeypatch, caplog):
    store = programs()
    monkeypatch.setattr(store, "_limit", FewMaps(store, 10))
    monkeypatch.setattr(store, "_at_once", 1)
    before = store.num_dropped
    llm = golden_llm(PAIR, num_speculative_tokens=None, max_num_seqs=4)
    prompts = [prompt(*case["input_ids"]) for case in CASES]
    for number, params in [
        (4, greedy(80)),
        (1, greedy(80, logprobs=2)),
        (3, greedy(80, speculation=False)),
        (2, greedy(80)),
    ]:
        outputs = llm.generate(prompts[:number], params)
        assert tokens_of(outputs) == [case["output_ids"] for case in CASES[:number]]
        store.join()
        assert store.num_compiled <= 12  # two are compiled at a time
    assert store.num_dropped > before


def shapes_of(*, on_cpu, max_model_len, max_num_seqs=16):
    return Shapes.of(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=max_model_len,
        page_size=64,
        table_width=-(-(max_model_len + 32) // 64),
        block=16,
        adaptive=True,
        on_cpu=on_cpu,
    )


@pytest.mark.parametrize("max_model_len", [2048, 8192, 40_960], ids=["embedded", "smollm2", "qwen3-8b"])
def test_engines_have_few_programs(max_model_len):
    few = shapes_of(on_cpu=True, max_model_len=max_model_len).programs()
    more = shapes_of(on_cpu=False, max_model_len=max_model_len).programs()
    for some, most in ((few, 60), (more, 140)):
        assert len(set(some)) == len(some) <= most
        assert len(set(map(str, some))) == len(some)  # each can be told from the others in the log


@pytest.mark.parametrize("on_cpu", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_load_is_compiled_for_and_nothing_else(monkeypatch, on_cpu):
    monkeypatch.setattr(Mesh, "is_cpu", on_cpu)
    llm = golden_llm(PAIR, num_speculative_tokens=None, max_num_seqs=4)
    number = 2 if on_cpu else 1  # side by side; on accelerators each sampling mode has programs of its own
    prompts = [prompt(*case["input_ids"]) for case in CASES[:number]]
    params = [greedy(40), SamplingParams(temperature=0.7, seed=1, max_tokens=40, min_tokens=9)][-number:]
    llm.compile(prompts, params)
    needed = programs().num_compiled
    assert needed < len(llm.engine.shapes.programs())
    for _ in range(2):
        llm.generate(prompts, params)
    assert llm.engine.num_compiles == 0
    programs().join()
    assert programs().num_compiled == needed
