"""On CPUs projections are held with their inputs first; nothing else about them changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import LLM
from dflash_jax.checkpoint.loader import load_params
from dflash_jax.config import draft_config, target_config
from dflash_jax.models.linear import project
from dflash_jax.models.tables import PROJECTIONS
from dflash_jax.models.transposed import Transposed, inputs_first
from tests.pairs import DRAFT, TARGET, write_model


def by_name(params):
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda node: isinstance(node, Transposed))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


@pytest.mark.parametrize(("shape", "rows", "inner"), [((6, 4), 1, (4,)), ((6, 2, 4), 1, (2, 4)), ((3, 2, 4), 2, (4,))])
def test_the_product_is_the_weight_s(shape, rows, inner):
    rng = np.random.default_rng(0)
    weight, x = (rng.standard_normal(s).astype(np.float32) for s in (shape, (2, 3, *inner)))
    found = project(jnp.asarray(x), Transposed(jnp.asarray(inputs_first(weight, rows)), shape))
    axes = range(-len(inner), 0)
    np.testing.assert_allclose(found, np.tensordot(x, weight, (axes, axes)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("raw", [TARGET, DRAFT, TARGET | {"attention_bias": True}], ids=["target", "draft", "biases"])
def test_projections_are_transposed_and_nothing_else(tmp_path, raw):
    read = target_config if raw is not DRAFT else lambda raw: draft_config(raw, num_target_layers=5)
    folder, config = write_model(tmp_path, raw, 0), read(raw)
    plain, held = (by_name(load_params(folder, config, jnp.float32, transpose=t)) for t in (False, True))
    assert plain.keys() == held.keys()
    for name, leaf in held.items():
        assert isinstance(leaf, Transposed) == name.endswith(tuple(f"['{x}']" for x in PROJECTIONS)), name
        assert leaf.shape == plain[name].shape
        values = leaf.values.T.reshape(leaf.shape) if isinstance(leaf, Transposed) else leaf
        np.testing.assert_array_equal(values, plain[name])


@pytest.mark.skipif(jax.default_backend() != "cpu" or jax.device_count() < 2, reason="needs 2 CPU devices")
def test_one_cpu_wants_them_so_and_several_do_not(tmp_path):
    folder = write_model(tmp_path, TARGET, 0)
    one, two = (LLM(folder, max_num_seqs=1, tensor_parallel_size=n).engine.runner.params[0] for n in (1, 2))
    assert any(isinstance(leaf, Transposed) for leaf in by_name(one).values())
    assert not any(isinstance(leaf, Transposed) for leaf in by_name(two).values())
