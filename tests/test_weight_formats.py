"""Layers know weights by the `Weight` protocol alone: a format that they have never heard of serves a target."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dflash_jax import LLM, frontend
from dflash_jax.models.projections import project_add_norm, project_heads, project_swiglu
from dflash_jax.parallel.collectives import Devices
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.weights.formats import grouped
from dflash_jax.weights.formats.array import ArrayWeight
from dflash_jax.weights.formats.fp8 import Quantized, to_e4m3
from dflash_jax.weights.formats.protocol import Product, QuantizedRows, Weight, plain
from dflash_jax.weights.formats.side_by_side import SideBySide
from dflash_jax.weights.formats.transposed import Transposed, inputs_first
from dflash_jax.weights.formats.weight import project, weight_of
from dflash_jax.weights.loader import load_params
from dflash_jax.weights.parameters import PROJECTIONS
from pallas_kernels import _compat, gated, largest
from tests.pairs import OF_TWO_LAYERS, TWO_LAYERS, greedy, tokens_of, write_model
from tests.test_lossless import prompts_of

GROUP = 8  # inputs that share a scale
TOLERANCE = {"array": 0.15, "transposed": 0.15, "made up": 0.15}  # of products of 16 inputs; e4m3 has 0.7
called = set()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grouped:
    """int8 numbers with a scale for each group of inputs, as int4 and block-wise fp8 formats have them."""

    numbers: jax.Array  # int8 [*O, I / GROUP, GROUP]
    scales: jax.Array  # float32 [*O, I / GROUP]
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    wants_quantized_rows: bool = dataclasses.field(default=False, metadata={"static": True})
    needs_kernels: bool = dataclasses.field(default=False, metadata={"static": True})

    @staticmethod
    def of(weight, rows):
        grouped = weight.reshape(*weight.shape[:rows], -1, GROUP)
        scales = jnp.abs(grouped).max(axis=-1) / 127
        return Grouped(jnp.round(grouped / scales[..., None]).astype(jnp.int8), scales, weight.shape)

    @property
    def nbytes(self):
        return self.numbers.nbytes + self.scales.nbytes

    def array(self):
        return (self.numbers * self.scales[..., None]).reshape(self.shape)

    def product(self, x, dtype=None, *, kernels=False):
        called.add("product")
        weight = (self.numbers * self.scales[..., None]).reshape(-1, x.shape[-1])
        product = jnp.matmul(
            plain(x, "grouped int8"), weight.T, precision="highest", preferred_element_type=jnp.float32
        )
        return product.astype(dtype or x.dtype)

    def unscaled(self, x, *, kernels):
        called.add("unscaled")
        return Product(self.product(x), None)

    def split(self, x, *, kernels):
        """In two parts, which only a caller that sums parts gets right."""
        called.add("split")
        if not kernels:
            return Product(self.product(x), None)
        product = self.product(x, jnp.float32)
        return Product(jnp.stack([product / 4, 3 * product / 4]), None)

    def gated(self, x, *, kernels):
        called.add("gated")
        return gated(self.product(x).reshape(*x.shape[:-1], *self.shape[:-1]))

    def largest(self, x, length=None, limit=None, *, kernels):
        called.add("largest")
        return largest(self.product(x, jnp.float32), limit)

    def shard(self, axis, name):
        return None


@pytest.mark.parametrize(
    "devices",
    [
        1,
        pytest.param(4, marks=[pytest.mark.long, pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")]),
    ],
)
def test_a_made_up_format_serves_a_target(tmp_path, monkeypatch, devices):
    sizes = {"num_key_value_heads": 4, "vocab_size": 64}
    folders = (
        write_model(tmp_path / "target", TWO_LAYERS | sizes, 0),
        write_model(tmp_path / "draft", OF_TWO_LAYERS | sizes, 1),
    )

    def load(convert):
        def load_converted(folder, config, dtype, place, *, transpose, quantize):
            params = load_params(folder, config, dtype, place)
            return jax.tree_util.tree_map_with_path(convert, params) if folder == folders[0] else params

        monkeypatch.setattr(frontend, "load_params", load_converted)
        llm = LLM(*folders, max_num_seqs=2, num_speculative_tokens=5, dtype="float32", tensor_parallel_size=devices)
        return llm.generate(prompts_of(3, 64), greedy(20)), llm.engine.runner.params[0]

    def grouped(path, array):
        name = path[-1].key
        is_matrix = name in (*PROJECTIONS, "lm_head")
        return (
            Grouped.of(array, 1 if name in ("o_proj", "down_proj", "lm_head") else array.ndim - 1)
            if is_matrix
            else array
        )

    called.clear()
    outputs, params = load(grouped)
    assert isinstance(params["layers_0"]["mlp"]["down_proj"], Grouped)
    assert called == {"product", "unscaled", "split", "gated", "largest"}
    expected, _ = load(lambda path, a: g.array() if isinstance(g := grouped(path, a), Grouped) else g)
    assert tokens_of(outputs) == tokens_of(expected)
    assert len({token for tokens in tokens_of(outputs) for token in tokens}) > 3


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def groups_of(weight, rows):
    """e4m3 numbers, with a scale for each row's groups of 8."""
    flat = weight.reshape(*weight.shape[:rows], -1, GROUP)
    scales = jnp.abs(flat).max(axis=-1) / 448
    values = (flat / scales[..., None]).astype(jnp.float8_e4m3fn).reshape(*weight.shape[:rows], -1)
    return grouped.Grouped(values, scales, inner=weight.shape[rows + 1 :])


def formats_of(weight, rows):
    return {
        "array": ArrayWeight(weight),
        "transposed": Transposed(jnp.asarray(inputs_first(np.asarray(weight), rows)), weight.shape),
        "fp8": Quantized(*to_e4m3(weight, rows), is_whole=True),
        "groups": groups_of(weight, rows),
        "side by side": SideBySide((ArrayWeight(weight[:1]), groups_of(weight[1:], rows)), 0, rows),
        "made up": Grouped.of(weight, rows),
    }


@pytest.mark.parametrize("name", ["array", "transposed", "fp8", "groups", "side by side", "made up"])
def test_every_format_keeps_the_protocol(name):
    """Members, shapes, and one product behind all methods, with kernels and without."""
    x, array = random(0, 2, 3, 16), random(1, 4, 2, 8, 16)
    weight = formats_of(array, 3)[name]
    assert isinstance(weight, Weight)
    assert weight_of(weight) is weight
    assert weight.shape == array.shape
    assert weight.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
    assert jax.tree.structure(jax.tree.map(lambda leaf: leaf, weight)) == jax.tree.structure(weight)
    wanted = project(x, weight)
    np.testing.assert_allclose(wanted, jnp.einsum("bti,...i->bt...", x, array), atol=TOLERANCE.get(name, 0.7))
    for kernels in (False, True):
        parts, _ = split = weight.split(x, kernels=kernels)
        for values, scales in (
            weight.unscaled(x, kernels=kernels),
            (parts if parts.ndim == 3 else parts.sum(0), split[1]),
        ):
            factor = 1 if scales is None else scales[0][..., None] * scales[1].reshape(-1)
            np.testing.assert_allclose((values * factor).reshape(wanted.shape), wanted, rtol=1e-5, atol=1e-5)
        units = weight.gated(x, kernels=kernels)
        assert isinstance(units, QuantizedRows) == (kernels and weight.wants_quantized_rows)
        if isinstance(units, QuantizedRows):
            units = units.values.astype(jnp.float32) * units.scales[..., None]
        tolerance = 0.07 * float(jnp.abs(units).max()) if name == "fp8" else 1e-4
        np.testing.assert_allclose(units, gated(wanted), atol=tolerance)
        head = formats_of(array.reshape(-1, 16), 1)[name]
        token, _ = head.largest(x, kernels=kernels)
        np.testing.assert_array_equal(token, project(x, head).argmax(axis=-1))


@pytest.mark.parametrize("name", ["array", "fp8", "groups", "side by side", "transposed"])
def test_specs_of_the_parts(name):
    weight = formats_of(random(2, 4, 8), 1)[name]
    first, second = (jax.tree.leaves(weight.shard(axis, "tp")) for axis in (0, 1))
    split, inner = PartitionSpec("tp"), PartitionSpec(None, "tp")
    each = {"array": ([split], [inner]), "fp8": ([split, split], [inner, PartitionSpec()]), "transposed": ([], [])}
    each |= {"groups": ([split] * 2, [inner] * 2), "side by side": ([], [inner] * 3)}
    assert (first, second) == each[name]


def test_only_weights_that_want_quantised_rows_get_them():
    """On one device and without a bias, as the drafter's kernels take them."""
    x, inputs, norm, bias = random(3, 1, 2, 16), random(4, 1, 2, 16), jnp.ones(16), jnp.ones(16)
    one = Devices(Mesh.of(1))
    for name, weight in formats_of(random(5, 16, 16), 1).items():
        kinds = [
            isinstance(project_add_norm(x, inputs, weight, b, norm, 1e-6, one)[1], QuantizedRows) for b in (None, bias)
        ]
        assert kinds == [name == "fp8", False]
    rows = QuantizedRows(*to_e4m3(x, 2), x.dtype)
    for name, weight in formats_of(random(6, 2, 2, 4, 16), 3).items():
        if name == "fp8":
            assert isinstance(project_swiglu(rows, weight, None, one), QuantizedRows)
        else:
            with pytest.raises(TypeError, match=r"multiplied by a weight in fp8; this is (a|grouped)"):
                project_swiglu(rows, weight, None, one)


def test_programs_of_one_device_have_no_collectives():
    """A mesh of one device calls functions as they are."""
    mesh = Mesh.of(1)
    assert mesh.on_each(jnp.sin, PartitionSpec("tp"), PartitionSpec("tp")) is jnp.sin
    x, norm = random(7, 1, 2, 16), jnp.ones(16)
    for weight in formats_of(random(8, 16, 16), 1).values():
        traced = jax.jit(lambda x, w: project_add_norm(x, x, w, None, norm, 1e-6, Devices(mesh))[0]).trace(x, weight)
        assert not {name for name in ("shard_map", "psum") if name in str(traced.jaxpr)}


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_devices_multiply_their_parts_of_few_bits_by_kernels(monkeypatch):
    """XLA would widen the whole weight in memory before each product."""
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))
    devices = Devices(Mesh.of(2))
    norm = jnp.ones(128)
    products = {
        "heads": lambda x, w: project_heads(x, w, None, devices),
        "gates": lambda x, w: project_swiglu(x, w, None, devices),
        "sum": lambda x, w: project_add_norm(x, x, w, None, norm, 1e-6, devices),
    }
    for name, product in products.items():
        outputs = (128,) if name == "sum" else (2, 2, 64)
        values = jax.ShapeDtypeStruct((*outputs, 32), jnp.uint16)
        weight = grouped.Grouped(values, jax.ShapeDtypeStruct((*outputs, 2), jnp.float16))
        traced = jax.jit(product).trace(jax.ShapeDtypeStruct((1, 4, 128), jnp.bfloat16), weight)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "quantized_product" in text, name
        assert "xla.gpu.triton" in text, name
