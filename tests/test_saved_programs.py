"""Programs in files: found by what they are traced from, and by nothing less."""

import functools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax import SamplingParams
from dflash_jax.engine.device.slots import Controls, Logprobs
from dflash_jax.engine.programs import saved as module
from dflash_jax.engine.programs.program import Program
from dflash_jax.engine.programs.store import Programs, programs
from dflash_jax.parallel import platform
from tests.pairs import golden_cases, golden_llm, greedy, prompt

PAIR = "qwen3_swa_tied"
CASE = golden_cases(PAIR)[0]


def add(state, x, *, factor, scale=None):
    return state + factor * x, (x, scale(x) if scale else None)


def swapped(controls):
    return Logprobs(controls.counts, controls.prompted, controls.stops, controls.bias)


def double(x):
    return 2 * x


def times(x, count):
    return count * x


def program_of(store, size=4, options=None, place=None, **static):
    arguments = (jax.device_put(jnp.zeros(size), place), np.zeros(size, np.float32))
    static = {"factor": 1} | static
    return store.find(Program(store.compile, "add", add, ["state"], arguments, static, options or {}))


def compiled_in(store, **options):
    program = program_of(store, **options)
    store.compile(program)
    return program


def store_in(folder):
    return Programs(saved=module.SavedPrograms(folder))


def use_jaxs_cache(is_enabled):
    jax.config.update("jax_enable_compilation_cache", is_enabled)
    compilation_cache.reset_cache()  # JAX asks its settings once


@pytest.fixture(autouse=True)
def without_jaxs_cache():
    """A program that XLA's CPU backend has loaded is saved without its code."""
    is_enabled = jax.config.jax_enable_compilation_cache
    use_jaxs_cache(False)
    yield
    use_jaxs_cache(is_enabled)


@pytest.fixture
def never_lowers(monkeypatch):
    """From when it is called, no program is traced."""

    def fail(program):
        raise AssertionError(f"{program.label} is traced")

    return lambda: monkeypatch.setattr(Program, "lower", fail)


def mesh_of(*devices):
    return jax.make_mesh((len(devices),), ("tp",), devices=[jax.devices()[device] for device in devices])


def files(folder):
    return sorted(file for version in folder.iterdir() for file in version.iterdir())


@pytest.mark.parametrize("devices", [(0,), (-1,), (-1, 0)])
def test_another_process_finds_it(tmp_path, never_lowers, devices):
    """Also on one of several devices, whose number it is compiled for, or on two, in their order."""
    if len(devices) > len(jax.devices()):
        pytest.skip(f"needs {len(devices)} devices")
    place, x = NamedSharding(mesh_of(*devices), PartitionSpec("tp")), np.arange(4, dtype=np.float32)
    made = compiled_in(store_in(tmp_path), place=place)(jax.device_put(jnp.ones(4), place), x)
    never_lowers()
    state = jax.device_put(jnp.ones(4), place)
    found = program_of(store_in(tmp_path), place=place)(state, x)
    assert jax.tree.structure(found) == jax.tree.structure(made)
    np.testing.assert_array_equal(found[0], made[0])
    assert found[0].sharding.is_equivalent_to(place, ndim=1)
    assert state.is_deleted()


def test_what_differs_in_anything_is_another_program(tmp_path):
    number, orders = 0, [(0, 1), (1, 0)] if len(jax.devices()) > 1 else []
    for static in (
        {},
        {"size": 5},
        {"factor": 2},
        {"options": {"xla_embed_ir_in_executable": True}},
        {"place": jax.devices()[-1], "size": 6},
        *({"place": NamedSharding(mesh_of(*order), PartitionSpec()), "size": 6} for order in orders),
        {"scale": double},
        {"scale": functools.partial(times, count=2)},
        {"scale": functools.partial(times, count=3)},
    ):
        store = store_in(tmp_path)
        compiled_in(store, **static)
        number += 1
        assert len(files(tmp_path)) == number
    for nameless in (lambda x: x, functools.partial(lambda x: 3 * x)):
        compiled_in(store, scale=nameless)  # another lambda of this function has the same name
    assert len(files(tmp_path)) == number


@pytest.mark.parametrize("damage", [b"", b"not a program"])
def test_a_damaged_file_is_compiled_and_written_again(tmp_path, caplog, damage):
    store = store_in(tmp_path)
    compiled_in(store)
    [file] = files(tmp_path)
    whole = len(file.read_bytes())
    file.write_bytes(damage)
    again = store_in(tmp_path)
    result = compiled_in(again)(jnp.ones(4), np.ones(4, np.float32))
    np.testing.assert_array_equal(result[0], np.full(4, 2))
    assert f"add is compiled again, since {file} cannot be read" in caplog.text
    assert abs(len(file.read_bytes()) - whole) < whole / 10


def test_a_folder_that_cannot_be_made_is_named_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    result = compiled_in(store_in(tmp_path / "file" / "folder"))(jnp.ones(4), np.ones(4, np.float32))
    np.testing.assert_array_equal(result[0], np.full(4, 2))
    [record] = caplog.records
    assert f"Not a directory: '{tmp_path}/file/folder" in record.message


@pytest.mark.parametrize(
    "changed", ["_sources", "xla_flags", *(["_processor"] if jax.default_backend() == "cpu" else [])]
)
def test_other_code_flags_or_processors_have_other_programs(tmp_path, monkeypatch, changed):
    """Those that nobody has asked for in a month are deleted."""
    store = store_in(tmp_path)
    compiled_in(store)
    [old] = tmp_path.iterdir()
    monkeypatch.setattr(module, changed, lambda: "another")
    other = store_in(tmp_path)
    compiled_in(other)
    assert len(files(tmp_path)) == 2
    os.utime(old, times=(time.time() - module.UNUSED_SECONDS - 60,) * 2)
    store_in(tmp_path)
    assert len(files(tmp_path)) == 1
    assert not old.exists()


@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.long)])
def test_an_engine_starts_from_files(tmp_path, monkeypatch, fresh_programs, unchecked, never_lowers, devices):
    """Everything it has, on the first of four devices and on all; answers of all kinds stay what they were."""
    if devices > len(jax.devices()):
        pytest.skip(f"needs {devices} devices")
    options = {"max_num_seqs": 1, "max_model_len": 128, "max_num_batched_tokens": 64, "tensor_parallel_size": devices}

    def answers():
        llm = golden_llm(PAIR, **options)
        llm.engine.compile()
        kinds = greedy(40, logprobs=2), SamplingParams(temperature=0.8, seed=1, max_tokens=20, presence_penalty=0.5)
        answers = [llm.generate(prompt(*CASE["input_ids"]), kind)[0].outputs[0] for kind in kinds]
        assert llm.engine.num_compiles == 0
        return [(answer.token_ids, answer.logprobs) for answer in answers]

    monkeypatch.setattr(programs(), "_saved", module.SavedPrograms(tmp_path))
    made = answers()
    assert made[0][0] == CASE["output_ids"][:40]
    number = programs().num_compiled
    assert len(files(tmp_path)) == number > 2
    programs().clear()
    never_lowers()
    assert answers() == made
    assert programs().num_compiled == number


def test_a_result_is_what_it_was_although_an_argument_has_as_many_fields(tmp_path, never_lowers, unchecked):
    """JAX takes the structures of such dataclasses for equal."""

    def run():
        store, arrays = store_in(tmp_path), [np.zeros((1, 1), np.float32)] * 4
        controls = Controls(*map(jnp.asarray, arrays))
        return store.find(Program(store.compile, "swap", swapped, [], (controls,), {}, {}))(controls)

    assert isinstance(run(), Logprobs)
    never_lowers()
    assert isinstance(run(), Logprobs)


def test_the_users_own_cache_stays_the_only_one(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_CACHE_DIR", str(tmp_path))
    is_enabled, folder = jax.config.jax_enable_compilation_cache, jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "of the user"))
        assert platform.folder_of_programs() is None
        jax.config.update("jax_compilation_cache_dir", None)
        assert platform.folder_of_programs() == tmp_path / "programs"
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        platform.enable_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "xla")
        assert platform.folder_of_programs() == tmp_path / "programs"  # beside JAX's cache of other programs
        jax.config.update("jax_enable_compilation_cache", False)
        assert platform.folder_of_programs() is None
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_enable_compilation_cache", is_enabled)
