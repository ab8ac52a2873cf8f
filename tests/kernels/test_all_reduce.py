"""Sums over devices against numpy: the library's on 4 virtual devices, on several GPUs also the kernel's."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from pallas_kernels import Peers, all_reduce, all_reduce_add_norm
from pallas_kernels.all_reduce import mosaic, reach_each_other
from pallas_kernels.all_reduce.peers import MAX_ROWS, ONE_SHOT_ROWS, one_shot_rows
from tests.kernels.cases import BF16, F32, cuda_lowering
from tests.kernels.conftest import ON_GPU

DEVICES = len(jax.devices()) if ON_GPU else 4
F16 = jnp.float16
EPS = 1e-6
ROWS = (1, 7, ONE_SHOT_ROWS, ONE_SHOT_ROWS + 1, MAX_ROWS)
IMPLEMENTATIONS = ["library", "mosaic"] if ON_GPU else ["library"]
pytestmark = pytest.mark.skipif(not 1 < DEVICES <= len(jax.devices()), reason="needs several devices")


@functools.cache
def mesh():
    return Mesh(np.array(jax.devices()[:DEVICES]), ("tp",))


@functools.cache
def peers():
    """Mailboxes; on CPUs for their shapes alone."""
    assert reach_each_other(list(mesh().devices.flat)) == ON_GPU
    return Peers.of(mesh(), 16384)


def put(array, spec):
    return jax.device_put(array, NamedSharding(mesh(), spec))


def arguments(rows, width, dtype, seed):
    """X, each device's y, and a weight."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x = put(jax.random.normal(keys[0], (1, rows, width), dtype), Spec())
    y = put(jax.random.normal(keys[1], (DEVICES, 1, rows, width), dtype), Spec("tp"))
    return x, y, put(jax.random.normal(keys[2], (width,), dtype), Spec())


@functools.cache
def program(with_norm, implementation):
    def on_each(x, y, weight, peers):
        if with_norm:
            return all_reduce_add_norm(x, y[0], weight, EPS, "tp", peers, implementation=implementation)
        return all_reduce(y[0], "tp", peers, implementation=implementation)

    specs = (Spec(), Spec("tp"), Spec(), Spec("tp"))
    return jax.jit(jax.shard_map(on_each, mesh=mesh(), in_specs=specs, out_specs=Spec(), check_vma=False))


def run(with_norm, implementation, *operands):
    return program(with_norm, implementation)(*operands, peers())


def copies(array):
    """Each device's copy of a replicated array."""
    arrays = [np.asarray(shard.data.astype(F32)) for shard in array.addressable_shards]
    assert len(arrays) == DEVICES
    return arrays


def assert_sum(total, y, dtype):
    """Every device has the same bits, and they are the sum."""
    first, *others = copies(total)
    assert all((other.view(np.uint32) == first.view(np.uint32)).all() for other in others)
    exact = np.asarray(y.astype(F32), np.float64).sum(axis=0)
    largest = np.abs(np.asarray(y.astype(F32))).max() * DEVICES
    np.testing.assert_allclose(first, exact, rtol=0, atol=2 * largest * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=lambda d: jnp.dtype(d).name)
def test_sums(implementation, dtype):
    """One after another in one set of mailboxes, long rows behind short ones: nothing is left behind."""
    short, long = [(1, 256), (33, 256), (16, 2560)], [(r, 4096) for r in ROWS]
    shapes = long + 2 * (short + long) + long if implementation == "mosaic" else [long[1], short[1]]
    for seed, (rows, width) in enumerate(shapes):  # the library has no mailboxes; the next test has its ROWS
        _, y, _ = operands = arguments(rows, width, dtype, seed)
        assert_sum(run(False, implementation, *operands), y, dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("rows", ROWS)
def test_sum_is_added_and_normed(implementation, dtype, rows):
    x, _, weight = operands = arguments(rows, 1024, dtype, rows)
    total, normed = run(True, implementation, *operands)
    summed = run(False, implementation, *operands)
    wanted = np.asarray((x + summed).astype(F32))
    for copy in copies(total):
        np.testing.assert_allclose(copy, wanted, rtol=1e-6, atol=1e-6)
    unit = wanted / np.sqrt((wanted.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + EPS)
    tolerance = 1e-5 if dtype == F32 else 2e-2
    for copy in copies(normed):
        np.testing.assert_allclose(copy, unit * np.asarray(weight.astype(F32)), rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 64])
def test_every_number_arrives(rows):
    """The NaN whose bits mark an empty mailbox, infinities and zeros of both signs arrive too."""
    bits = np.zeros((DEVICES, 1, rows, 512), np.uint16)
    bits[0] = np.random.default_rng(0).integers(0, 1 << 16, bits.shape[1:], np.uint16)
    bits[0, :, :4] = 0xFFFF
    y = put(jax.lax.bitcast_convert_type(jnp.asarray(bits), BF16), Spec("tp"))
    x, _, weight = arguments(rows, 512, BF16, 0)
    wanted = np.asarray(y.astype(F32))[0]
    for copy in copies(run(False, "mosaic", x, y, weight)):
        np.testing.assert_array_equal(copy, wanted)


@pytest.mark.gpu
def test_a_chain_of_sums_in_one_program():
    """Each waits for the one before; kinds of calls and lengths of rows mixed, run again and again."""

    def on_each(y, peers):
        x = y[0, 0]
        for i in range(30):
            rows = (16, 200, 3)[i % 3]
            mean = all_reduce(x[:rows] / DEVICES, "tp", peers, implementation="mosaic")
            padded = jnp.pad(mean, ((0, len(x) - rows), (0, 0)))
            x = jnp.where(jnp.arange(len(x))[:, None] < rows, padded, x)
        return x

    sharded = jax.shard_map(on_each, mesh=mesh(), in_specs=Spec("tp"), out_specs=Spec(), check_vma=False)
    x, y, _ = arguments(200, 1024, F32, 5)
    same = put(jnp.broadcast_to(x[None], y.shape), Spec("tp"))  # a mean of equals is itself
    step = jax.jit(sharded)
    for _ in range(50):
        for copy in copies(step(same, peers())):
            np.testing.assert_allclose(copy, np.asarray(x[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [ONE_SHOT_ROWS, MAX_ROWS])
@pytest.mark.parametrize(("width", "dtype"), [(4096, BF16), (2560, BF16), (1024, F16), (2048, F32)])
def test_both_kinds_lower_for_cuda(rows, width, dtype):
    struct = jax.ShapeDtypeStruct
    operands = struct((rows, width), dtype), struct((DEVICES, rows, width), dtype), struct((width,), dtype), peers()
    for with_norm in (False, True):
        assert "mosaic_gpu" in cuda_lowering(program(with_norm, "mosaic"), *operands)


def test_two_devices_have_mailboxes_for_one_shot_alone():
    """A counter for each row of both kinds of calls comes first; each mailbox exists three times."""
    assert [one_shot_rows(devices) for devices in (2, 3, 4, 8)] == [256, 32, 32, 32]
    assert Peers.bytes_of(2, 6144) == 4 * 2 * 256 + 3 * (256 * 2) * 6144
    assert Peers.bytes_of(4, 6144) == 4 * 2 * 256 + 3 * (32 * 4 + 256 * 5) * 6144


def test_what_the_kernel_refuses_is_said_and_left_to_the_library():
    def reason(shape, dtype):
        return mosaic.refusal(jax.ShapeDtypeStruct(shape, dtype), peers())

    assert reason((16, 4096), BF16) is None
    assert "multiple of 512 bytes; these have 200" in reason((16, 100), BF16)
    assert "rows of 16384 bytes; these have 32768" in reason((16, 8192), F32)
    assert "up to 256 rows; these are 257" in reason((257, 4096), BF16)
    assert "16-bit and 32-bit numbers; these are float8_e4m3fn" in reason((16, 4096), jnp.float8_e4m3fn)
    _, y, _ = operands = arguments(3, 100, F32, 0)
    assert_sum(run(False, None, *operands), y, F32)


def test_errors_name_what_is_wrong():
    x, y, weight = arguments(2, 128, F32, 0)
    call = functools.partial(all_reduce_add_norm, eps=EPS, axis="tp", peers=None)
    with pytest.raises(ValueError, match=r"x and y must be alike.*\[1, 2, 128\], \[1, 1, 128\] and \[128\]"):
        call(x, y[0, :, :1], weight)
    with pytest.raises(ValueError, match="needs mailboxes"):
        call(x, y[0], weight, implementation="mosaic")
    with pytest.raises(ValueError, match="'mosaic', 'library' or None; got 'nccl'"):
        call(x, y[0], weight, implementation="nccl")
    with pytest.raises(ValueError, match="floating; got int32"):
        all_reduce(jnp.zeros((2, 128), jnp.int32), "tp", None)
