"""Tests run on 4 virtual CPU devices; with DFLASH_TEST_GPU=1 on the GPUs of the machine, `gpu` tests included."""

import gc
import os
from collections import Counter, defaultdict
from itertools import combinations, product
from pathlib import Path

# Looking for garbage took a twentieth of the suite's time. Engines and their pools, gigabytes of four devices, are
# freed without the collector.
gc.set_threshold(10_000, 20, 100)
ON_GPU = os.environ.get("DFLASH_TEST_GPU") == "1"
if not ON_GPU:  # before the first import of jax: a device count cannot be changed later
    os.environ["JAX_PLATFORMS"] = "cpu"
    FLAGS = "--xla_force_host_platform_device_count=4"
    # Most programs of tests run a few times over a few numbers: LLVM's optimisations take longer than they save,
    # without them XLA's older emitters compile in half the time, and the other core has a worker that compiles, too.
    # This also holds for the servers and notebooks that tests start.
    FLAGS += " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ["HF_HUB_OFFLINE"] = "1"
# Most of the suite's time goes into compiling, and much of it is compiled more than once: by other modules, by the
# other workers, by servers that tests start, and by the next run.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # of programs, which nobody looks for in these

import hypothesis
import jax
import jaxtyping
import pytest

from dflash_jax.engine.programs.store import MapLimit, programs

hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine fails no test
hypothesis.settings.load_profile("untimed")

DATA = Path(__file__).parent / "data"
MAPPINGS = Path("/proc/self/maps")  # Linux has it
MOST_MAPPINGS = 10_000  # of memory, at the end of a module: the process has some 5 GB then
WITH_ONE_SERVER = ("tests/serve/running/", "tests/serve/hostile/")
RUNS_LONG = "DFLASH_TEST_LONG" in os.environ
SKIPPED = {  # marks whose tests are left out here, with the reason
    "gpu": None if ON_GPU else "needs an NVIDIA GPU: run with DFLASH_TEST_GPU=1 on one",
    "ray": None if "DFLASH_TEST_RAY" in os.environ else "needs Ray: make test-ray",
    "long": None if RUNS_LONG else "one more shape of what is tested anyway: run with DFLASH_TEST_LONG=1",
}


def pytest_collection_finish():
    """Look for garbage elsewhere than among what imports have left."""
    gc.collect()
    gc.freeze()


def scope_of(nodeid: str) -> str:
    """The file of a test, or the folder whose tests share a server: its tests run in one worker."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in WITH_ONE_SERVER if file.startswith(folder)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let a worker compile once what tests share, and start one server for a folder."""
    from xdist.scheduler import LoadFileScheduling

    class ByScope(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return scope_of(nodeid)

    return ByScope(config, log) if config.getvalue("dist") == "loadfile" else None


def turns(sizes, count):
    """So many combinations of indices of axes: first those with values that none has, then with pairs that none has."""
    left, seen, chosen = list(product(*map(range, sizes))), set(), set()
    while left and len(chosen) < count:
        values = {place: set(enumerate(place)) for place in left}
        pairs = {place: set(combinations(enumerate(place), 2)) for place in left}
        best = max(left, key=lambda place: (len(values[place] - seen), len(pairs[place] - seen)))
        seen |= values[best] | pairs[best]
        chosen.add(best)
        left.remove(best)
    return chosen


def leave_out_second_shapes(items):
    """Mark as `long` what `in_turns(count)` leaves out of all combinations of a test's parameters."""
    tests = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("in_turns"):
            tests[item.nodeid.partition("[")[0], *mark.args].append(item)
    for (_, count), every in tests.items():
        # Arguments that are given together have the same indices, and are one axis.
        axes = list(dict.fromkeys(zip(*(item.callspec.indices.values() for item in every), strict=True)))
        chosen = turns([1 + max(axis) for axis in axes], count)
        for item, place in zip(every, zip(*axes, strict=True), strict=True):
            if place not in chosen:
                item.add_marker(pytest.mark.long)


def pytest_collection_modifyitems(items):
    """Begin with the largest files and folders, so that no worker waits long for another's last."""
    sizes = Counter()
    for path, scope in {(item.path, scope_of(item.nodeid)) for item in items}:
        sizes[scope] += path.stat().st_size
    items.sort(key=lambda item: (-sizes[scope_of(item.nodeid)], item.path))
    leave_out_second_shapes(items)
    for item in items:
        for mark, reason in SKIPPED.items():
            if reason and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Forget the steps of engines after each module, which are of no use to the next, and all programs once in a while.

    A program takes a few mappings of memory, of which Linux gives a process 65,530. The small ones, conversions and
    sums, are of use to other modules, too: compiled again for each they took 4 % of the suite's time.
    """
    yield
    drop_programs()
    if not MAPPINGS.exists() or MapLimit().count() > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture
def fresh_programs():
    """No program from before a test, and none of it afterwards: compiled steps do not notice what a test patches."""
    drop_programs()
    yield
    drop_programs()


def drop_programs():
    """Forget all programs, those being compiled included. What waits to be compiled is not compiled any more."""
    programs().clear()
    programs().join()
    programs().clear()


@pytest.fixture
def unchecked():
    """Lowering puts things that are no arrays into our classes, which the checks of shapes in tests would refuse."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
