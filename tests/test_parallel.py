"""What devices that share a model tell each other, against one device that has all of it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from dflash_jax.engine.device.sampling import sample
from dflash_jax.engine.device.slots import StepSpec
from dflash_jax.engine.device.steps import bind_target
from dflash_jax.models import projections
from dflash_jax.models.projections import project_add_norm
from dflash_jax.parallel.collectives import AUTOMATIC, Devices, highest, likeliest, look_up
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import target_config
from dflash_jax.weights.formats.fp8 import Quantized, to_e4m3
from dflash_jax.weights.parameters import build, parameters_of
from dflash_jax.weights.tables import checkpoint_table
from pallas_kernels import Peers, _compat
from tests.pairs import TARGET, empty_cache
from tests.test_sampling import sampler

DEVICES = 4
pytestmark = pytest.mark.skipif(jax.device_count() < DEVICES, reason="needs 4 devices")


@pytest.fixture(scope="module")
def devices():
    return Devices(Mesh.of(DEVICES))


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def put(devices, array, *spec):
    return jax.device_put(array, NamedSharding(devices.mesh.devices, Spec(*spec)))


@pytest.mark.parametrize("vocab_size", [512, 64, 61])  # the first is searched by parts
def test_likeliest_is_argmax(devices, vocab_size):
    logits = np.array(random(0, 2, 7, vocab_size))
    logits[0, 0] = 3.0  # all alike: the first
    logits[0, 1, [5, 20, vocab_size - 1]] = 9.0  # three alike, on several devices
    logits[0, 5, [vocab_size - 70, vocab_size - 3]] = 9.0
    logits[0, 2, 40] = np.nan
    logits[0, 3] = -np.inf
    logits[0, 4, vocab_size - 1] = np.inf
    given = put(devices, logits, None, None, "tp" if vocab_size % DEVICES == 0 else None)
    token, value = jax.jit(lambda x: likeliest(x, devices))(given)
    np.testing.assert_array_equal(token, logits.argmax(axis=-1))
    np.testing.assert_array_equal(value, np.max(logits, axis=-1))
    np.testing.assert_array_equal(jax.jit(lambda x: highest(x, devices))(given), np.max(logits, axis=-1))


@pytest.mark.parametrize("length", [64, 61])
def test_look_up(devices, length):
    table = random(1, length, 8)
    tokens = jnp.array([[0, length - 1, 15, 16], [31, 32, 47, 48]], jnp.int32)
    given = put(devices, table, "tp" if length % DEVICES == 0 else None)
    np.testing.assert_array_equal(jax.jit(lambda t, i: look_up(t, i, devices))(given, tokens), table[tokens])


@pytest.mark.parametrize("heads", [8, 6], ids=["split", "whole"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_of_split_inputs(devices, heads, with_bias):
    x, inputs, norm = random(2, 2, 3, 16), random(3, 2, 3, heads, 4), random(4, 16)
    weight, bias = random(5, 16, heads, 4), random(6, 16) if with_bias else None
    wanted = project_add_norm(x, inputs, weight, bias, norm, 1e-6, AUTOMATIC)
    split = (None, "tp") if heads % DEVICES == 0 else ()
    given = put(devices, weight, *split)
    found = jax.jit(lambda w: project_add_norm(x, inputs, w, bias, norm, 1e-6, devices))(given)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("serves", [True, False])
def test_a_product_is_left_in_parts_for_who_adds_it(monkeypatch, serves):
    """Where it is for serving; what is trained has none."""
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))
    seen = []

    def added(x, y, *others, **options):
        seen.append(y.shape)
        return x, x

    monkeypatch.setattr(projections, "add_norm", added)
    shapes = (2, 128, 4096), (2, 128, 12288), (4096, 12288), (4096,)
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    over = Devices(Mesh.of(1)) if serves else AUTOMATIC
    jax.eval_shape(lambda x, y, weight, norm: project_add_norm(x, y, weight, None, norm, 1e-6, over), *given)
    assert seen == [(2, 2, 128, 4096) if serves else (2, 128, 4096)]


def test_a_quantised_weight_of_split_inputs(devices):
    """Each device scales its own inputs, so that the result is no worse than on one."""
    x, inputs, norm = jnp.zeros((1, 3, 16)), random(7, 1, 3, 256), jnp.ones(16)
    weight = random(8, 16, 256)
    exact, _ = project_add_norm(x, inputs, weight, None, norm, 1e-6, AUTOMATIC)
    small = Quantized(*to_e4m3(weight, 1))
    placed = Quantized(put(devices, small.values, None, "tp"), put(devices, small.scales))
    errors = []
    for given, over in ((small, AUTOMATIC), (placed, devices)):
        total, _ = jax.jit(lambda w, over=over: project_add_norm(x, inputs, w, None, norm, 1e-6, over))(given)
        errors.append(float(jnp.abs(total - exact).max() / jnp.abs(exact).max()))
    assert 0 < errors[1] < max(0.05, 1.5 * errors[0])


@pytest.mark.parametrize("has_peers", [True, False])
def test_with_mailboxes_nothing_is_left_for_the_library_to_sum(devices, monkeypatch, has_peers):
    """From tokens to tokens, lowered for GPUs."""
    sizes = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 64}
    config = target_config(TARGET | sizes)
    params = build(parameters_of(checkpoint_table(config), config), lambda parameter: jnp.ones(parameter.shape))
    tokens = jnp.array([[3, 1, 4]], jnp.int32)
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))

    def greedy(params, peers):
        model = bind_target(params | ({"peers": peers} if peers else {}), StepSpec(config, None, 1, devices.mesh))
        hidden, _, _ = model(tokens, jnp.arange(tokens.size)[None], empty_cache(config, tokens.size))
        return likeliest(model.logits(hidden), model.devices)

    traced = jax.jit(greedy).trace(params, Peers.of(devices.mesh.devices, 512) if has_peers else None)
    assert ("psum" in str(traced.jaxpr)) != has_peers
    assert ("mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()) == has_peers


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_samples_of_a_split_vocabulary(devices, temperature):
    """XLA has nothing to sum beside what our kernels sum: rows of 128 numbers."""
    logits, positions = random(9, 2, 3, 512) * 3, jnp.arange(6).reshape(2, 3)
    row = sampler(2, temperature=temperature, min_p=0.05)
    expected = sample(logits, positions, row, is_filtered=False)
    split = jax.jit(lambda *given: sample(*given, devices, is_filtered=False))
    compiled = split.lower(put(devices, logits, None, None, "tp"), positions, row).compile()
    for one, other in zip(compiled(put(devices, logits, None, None, "tp"), positions, row), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    summed = re.findall(r"= (\S+) (?:all-\S+|collective-\S+|reduce-scatter)\(", compiled.as_text())
    assert {shape.split("{")[0] for shape in summed} == {"f32[2,3,128]"}
