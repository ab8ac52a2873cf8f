"""Equal layers in a loop, as one CPU runs them, or traced once, give what they give one after another."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models import run
from dflash_jax.models.target import TargetModel
from dflash_jax.parallel.collectives import AUTOMATIC, Devices
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import LayerSpec, target_config
from dflash_jax.state.paged_kv import PagedKVCache, Place
from dflash_jax.weights.formats.array import ArrayWeight
from dflash_jax.weights.formats.one_of import OneOf
from dflash_jax.weights.formats.side_by_side import SideBySide
from dflash_jax.weights.formats.transposed import Transposed, inputs_first
from dflash_jax.weights.loader import load_params
from tests.kernels.conftest import ON_GPU
from tests.pairs import TARGET, write_model

pytestmark = pytest.mark.skipif(ON_GPU, reason="only CPUs loop over layers, and tracing one of a kind is alike on all")

LAYERS, PAGES, PAGE, K, H = TARGET["num_hidden_layers"], 6, 4, 2, 16
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 60, (2, 5)))
POSITIONS = jnp.array([[7, 8, 9, 10, 11], [2, 3, -1, -1, -1]])
BIASED = TARGET | {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "tie_word_embeddings": True}


def one_cpu():
    return Devices(Mesh.of(1))


def model_of(folder, raw=TARGET, devices=None):
    """A target of random weights, as one CPU holds them, norms and biases included."""
    config = dataclasses.replace(target_config(raw), dtype="float32")
    params = load_params(
        write_model(folder, raw, seed=3), config, jnp.dtype("float32"), lambda *_: jax.devices()[0], transpose=True,
        quantize=None,
    )  # fmt: skip
    return TargetModel(config, devices or one_cpu()).bind({"params": params})


def cache_of(layers=LAYERS):
    """Pages with random contents, and scales that are others for each layer."""
    rng = np.random.default_rng(1)

    def numbers(*shape):
        return jnp.asarray(rng.uniform(0.5, 1.5, shape), jnp.float32)

    pool = (layers * PAGES, K, PAGE, H)
    table = jnp.array([[3, 1, 5, -1], [0, 4, -1, -1]])
    return PagedKVCache(
        [numbers(*pool)], [numbers(*pool)], numbers(layers, K), numbers(layers, K), tables=(table,),
        valid_from=(jnp.zeros(2, jnp.int32),), places=tuple(Place(0, 0, i * PAGES) for i in range(layers)),
        mesh=Mesh.of(1),
    )  # fmt: skip


def loops(function, *arguments):
    """How many layers each loop over layers of a program has."""
    text = str(jax.make_jaxpr(lambda *a: function(*a))(*arguments))  # a new function, of which JAX remembers nothing
    return [layers for layers in range(2, LAYERS + 1) if f"length={layers}\n" in text]


def apart(monkeypatch, function, *arguments):
    with monkeypatch.context() as patch:
        patch.setattr(run, "LEAST_LOOPED", 100)
        assert not loops(function, *arguments)
        return function(*arguments)


@pytest.mark.parametrize(
    ("raw", "taps"),
    [
        *((TARGET, taps) for taps in [(), (3, 1, 3)]),
        (BIASED, (0, 2, 4)),
        *(pytest.param(TARGET, taps, marks=pytest.mark.long) for taps in [(1, 3), (0, 2, 4)]),
        *(pytest.param(BIASED, taps, marks=pytest.mark.long) for taps in [(), (1, 3), (3, 1, 3)]),
    ],
)
def test_a_loop_gives_what_layers_give_apart(tmp_path, monkeypatch, raw, taps):
    model, cache = model_of(tmp_path, raw), cache_of()
    for function, number in ((model.__call__, LAYERS), (model.prefill, LAYERS - 1)):
        call = TOKENS, POSITIONS, cache

        def results(tokens, positions, cache, function=function):
            return function(tokens, positions, cache, taps)

        assert loops(results, *call) == [number]
        looped, wanted = results(*call), apart(monkeypatch, results, *call)
        for one, other in zip(jax.tree.leaves(looped), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        assert np.abs(looped[-1].keys[0] - cache.keys[0]).reshape(LAYERS, -1).max(axis=1).all()  # each layer wrote


def with_another_format(model, cache):
    """The third layer's output projection in two halves."""
    params = dict(model.variables["params"])
    attention = params["layers_2"]["self_attn"]
    weight = attention["o_proj"]
    halves = tuple(Transposed(half, (16, *weight.shape[1:])) for half in jnp.split(weight.values, 2, axis=1))
    params["layers_2"] = params["layers_2"] | {"self_attn": attention | {"o_proj": SideBySide(halves, 0, 1)}}
    return TargetModel(model.config, model.devices).bind({"params": params}), cache


def with_a_window(model, cache):
    """The third layer sees four tokens."""
    spec = LayerSpec.attention(4, causal=True)
    config = dataclasses.replace(model.config, layers=(*model.config.layers[:2], spec, *model.config.layers[3:]))
    return TargetModel(config, model.devices).bind(model.variables), cache


def with_two_pools(model, cache):
    """The last layer's pages are in a pool of their own."""
    pools = {"keys": cache.keys * 2, "values": cache.values * 2}
    return model, dataclasses.replace(cache, **pools, places=(*cache.places[:-1], Place(0, 1, 0)))


def with_automatic_devices(model, cache):
    """As in training, where XLA places and differentiates everything."""
    return TargetModel(model.config, AUTOMATIC).bind(model.variables), cache


@pytest.mark.parametrize("change", [with_another_format, with_a_window, with_two_pools, with_automatic_devices])
def test_layers_that_are_not_equal_run_apart(tmp_path, change):
    model, cache = model_of(tmp_path), cache_of()
    assert loops(model, TOKENS, POSITIONS, cache) == [LAYERS]
    other, its_cache = change(model, cache)
    assert loops(other, TOKENS, POSITIONS, its_cache) == []


@pytest.mark.parametrize(
    ("change", "kinds"),
    [(with_another_format, 2), (with_a_window, 2), (with_two_pools, 1)],
    ids=["form", "mask", "pool"],
)
def test_layers_of_a_kind_are_traced_once_and_give_what_they_do_apart(tmp_path, monkeypatch, change, kinds):
    model, cache = change(model_of(tmp_path), cache_of())
    traced, one = [], run._one
    monkeypatch.setattr(run, "_one", lambda layer, *others: traced.append(layer.index) or one(layer, *others))
    shared = jax.jit(lambda *call: model(*call, (1, 3)))(TOKENS, POSITIONS, cache)
    assert len(traced) == kinds
    monkeypatch.setattr(run, "DividedCache", type("Undivided", (), {}))
    plain = jax.jit(lambda *call: model(*call, (1, 3)))(TOKENS, POSITIONS, cache)
    assert len(traced) == kinds
    for one_result, wanted in zip(jax.tree.leaves(shared), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one_result, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["array", "transposed"])
def test_one_of_several_weights_is_that_weight(form):
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((2, 3, 8)), jnp.float32)
    arrays = [rng.standard_normal((4, 2, 3, 8)).astype(np.float32) for _ in range(3)]
    make = ArrayWeight if form == "array" else lambda a: Transposed(jnp.asarray(inputs_first(a, 3)), a.shape)
    weights = tuple(make(jnp.asarray(a) if form == "array" else a) for a in arrays)

    @jax.jit
    def results(weight):
        return (
            weight.product(x), weight.product(x, jnp.bfloat16), weight.unscaled(x, kernels=True).values,
            weight.gated(x, kernels=True), weight.largest(x, kernels=False),
        )  # fmt: skip

    for index, weight in enumerate(weights):
        one = OneOf(weights, jnp.int32(index))
        assert (one.shape, one.nbytes) == (weight.shape, weight.nbytes)
        for found, wanted in zip(jax.tree.leaves(results(one)), jax.tree.leaves(results(weight)), strict=True):
            assert found.dtype == wanted.dtype
            np.testing.assert_allclose(found.astype(jnp.float32), wanted.astype(jnp.float32), rtol=1e-5, atol=1e-5)
