"""The programs of a process: shared, compiled beside the engine, dropped before memory maps run out."""

import gc
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax import ProgramLimitError
from dflash_jax.engine.device.shapes import StepShape
from dflash_jax.engine.programs import program as program_module
from dflash_jax.engine.programs import store as module
from dflash_jax.engine.programs.program import Program
from dflash_jax.engine.programs.store import KEPT, MapLimit, Programs, programs
from tests.pairs import golden_llm

MAPS_EACH = 100  # of the programs of a simulated process


def add(state, x, *, factor):
    return state + factor * x


def program_of(store, factor=1, size=4, function=add, label="add"):
    arguments = (jnp.zeros(size), np.zeros(size, np.float32))
    return store.find(Program(store.compile, label, function, ["state"], arguments, {"factor": factor}, {}))


class SimulatedLimit(MapLimit):
    """A process whose programs take 100 maps each, and whatever else takes `other`."""

    def __init__(self, most, other=0):
        super().__init__(most)
        self.store, self.other = None, other

    def count(self):
        return self.other + MAPS_EACH * self.store.num_compiled


def limited(monkeypatch, programs, other=0):
    """A store with room for so many programs in its half of the limit."""
    monkeypatch.setattr(module, "MAPS_OF_ONE", MAPS_EACH)
    limit = SimulatedLimit(2 * MAPS_EACH * programs, other)
    limit.store = Programs(limit)
    limit.store._at_once = 1
    return limit.store


def test_what_is_alike_is_one_program():
    store = Programs()
    assert program_of(store) is program_of(store)
    others = [
        program_of(store, factor=2),
        program_of(store, size=5),
        program_of(store, function=lambda state, x, *, factor: x),
    ]
    assert len({id(program) for program in (program_of(store), *others)}) == 4
    assert store.num_compiled == 0


def test_a_program_computes_in_place():
    store = Programs()
    program, state = program_of(store, factor=3), jnp.ones(4)
    after = program(state, np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(after, [1, 4, 7, 10])
    assert state.is_deleted()
    assert store.num_compiled == 1


def test_urgent_requests_come_first_in_their_order(monkeypatch):
    monkeypatch.setattr(module, "WORKERS", 1)
    store, begun = Programs(), []
    has_begun, may_go_on = threading.Event(), threading.Event()
    names = ["first", "idle", "urgent", "more urgent"]
    many = [program_of(store, factor=i, label=name) for i, name in enumerate(names)]
    build = store._build

    def slow(program, lowered=None, **options):
        begun.append(program.label)
        has_begun.set()
        assert may_go_on.wait(60)
        return build(program, lowered, **options)

    monkeypatch.setattr(store, "_build", slow)
    store.request([many[0]], is_urgent=False)
    assert has_begun.wait(60)
    store.request([many[1]], is_urgent=False)
    store.request(many[2:], is_urgent=True)
    store.request([many[2]], is_urgent=False)  # which makes it no less urgent
    assert store.is_compiling
    may_go_on.set()
    store.join()
    assert begun == ["first", "urgent", "more urgent", "idle"]
    assert all(program.executable for program in many)
    assert not store.is_compiling


def test_what_cannot_be_compiled_tells_who_calls_it(caplog):
    store, tries = Programs(), []

    def broken(state, x, *, factor):
        tries.append(1)
        raise ValueError("no such kernel")

    program = program_of(store, function=broken, label="broken step")
    with caplog.at_level(logging.WARNING):
        store.request([program], is_urgent=True)
        store.join()
    assert "broken step could not be compiled: no such kernel" in caplog.text
    for _ in range(2):  # of the first try, then of another
        with pytest.raises(ValueError, match="no such kernel"):
            program(jnp.zeros(4), np.zeros(4, np.float32))
    assert len(tries) == 2


def test_those_unused_for_longest_are_dropped_and_compiled_again(monkeypatch, caplog):
    store = limited(monkeypatch, KEPT + 4)
    many = [program_of(store, factor=i) for i in range(KEPT + 12)]
    x = np.ones(4, np.float32)
    with caplog.at_level(logging.WARNING):
        for program in many:
            many[0](jnp.zeros(4), x)  # which is always in use
            program(jnp.zeros(4), x)
            assert store.num_compiled <= KEPT + 4
    assert many[0].executable is not None
    assert many[1].executable is None
    assert store.num_dropped >= 8
    assert caplog.text.count("half of the memory maps") == 1
    np.testing.assert_array_equal(many[1](jnp.zeros(4), x), np.ones(4))


def test_a_process_without_room_says_so(monkeypatch):
    store = limited(monkeypatch, KEPT, other=2 * MAPS_EACH * KEPT)
    with pytest.raises(ProgramLimitError, match=r"has 1600 of the 1600 memory maps.*sysctl vm.max_map_count"):
        program_of(store)(jnp.zeros(4), np.zeros(4, np.float32))


@pytest.mark.parametrize("is_large", [False, True])
def test_what_is_compiled_beside_streams_is_rehearsed(monkeypatch, is_large):
    """Unless its arguments are large: what it is told is made of zeros, and thrown away."""
    if is_large:
        monkeypatch.setattr(program_module, "MOST_REHEARSED", 31)  # bytes
    store, seen = Programs(rehearses=True), []

    def watched(state, x, *, factor):
        jax.debug.callback(lambda value: seen.append(value.tolist()), x)
        return state + factor * x

    idle, beside = (program_of(store, factor, function=watched) for factor in (2, 3))
    store.request([idle], is_urgent=False)
    store.join()
    assert idle.executable is not None
    assert not seen
    store.has_streams = True
    store.request([beside], is_urgent=False)
    store.join()
    jax.effects_barrier()
    assert seen == ([] if is_large else [[0.0] * 4])
    np.testing.assert_array_equal(beside(jnp.ones(4), np.ones(4, np.float32)), [4, 4, 4, 4])


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices, which tests on CPUs have")
def test_what_is_spread_over_devices_is_not_rehearsed():
    """Two programs over several devices that run at once may wait for each other for ever."""
    store, seen = Programs(rehearses=True), []

    def watched(state, *, factor):
        jax.debug.callback(lambda value: seen.append(value), state.sum())
        return state * factor

    spread = NamedSharding(jax.make_mesh((2,), ("tp",)), PartitionSpec("tp"))
    state = jax.device_put(jnp.zeros(4), spread)
    program = store.find(Program(store.compile, "spread", watched, ["state"], [state], {"factor": 2}, {}))
    store.has_streams = True
    store.request([program], is_urgent=False)
    store.join()
    jax.effects_barrier()
    assert program.executable is not None
    assert not seen


def code_maps():
    """Memory maps of this process that hold code of no file: what was compiled. Others come and go as they like."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        return sum("x" in line.split()[1] and line.split()[4] == "0" for line in maps)


@pytest.mark.skipif(programs()._limit is None, reason="programs take memory maps on CPUs under Linux alone")
def test_a_dropped_program_gives_its_maps_back():
    llm = golden_llm("qwen3_swa_tied", max_num_seqs=1)
    shape = StepShape("verify_commit", 1, 16, llm.engine.layout.table_width, "any")
    program, before, total_before = llm.engine.runner.program(shape), code_maps(), MapLimit().count()
    programs().compile(program)
    with_it, total = code_maps(), MapLimit().count()
    program.executable = None
    assert with_it - before >= 10
    assert total >= with_it
    assert total_before >= before
    assert code_maps() - before < (with_it - before) / 2


def test_all_are_compiled_at_once_and_counted():
    store, done = Programs(), []
    many = [program_of(store, factor=i) for i in range(5)]
    many[2](jnp.zeros(4), np.zeros(4, np.float32))
    store.compile_all(many, lambda: done.append(1))
    assert len(done) == 5
    assert all(program.executable for program in many)
    assert not store.is_compiling
