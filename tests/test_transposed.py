"""On CPUs projections are held with their inputs first; nothing else about them changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import LLM
from dflash_jax.spec import draft_config, target_config
from dflash_jax.weights.formats.transposed import Transposed, inputs_first
from dflash_jax.weights.formats.weight import project
from dflash_jax.weights.loader import load_params
from dflash_jax.weights.parameters import PROJECTIONS
from tests.pairs import DRAFT, OF_TWO_LAYERS, TARGET, TWO_LAYERS, greedy, prompt, tokens_of, write_model


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


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_products_in_bfloat16_round_both_sides_and_no_sum(rows):
    rng = np.random.default_rng(0)
    weight, x = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((64, 48), (1, rows, 64)))
    found = project(x, Transposed(weight.astype(jnp.bfloat16), (48, 64)))
    wide = (np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (x, weight))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.matmul(*wide), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only CPUs hold a drafter so")
@pytest.mark.parametrize(
    "draft",
    [
        pytest.param({}, id="the target's head"),
        pytest.param({"draft_vocab_size": 50}, id="a head of its own", marks=pytest.mark.long),
    ],
)
def test_products_of_a_drafter_are_in_bfloat16_unless_told(tmp_path, draft):
    target = write_model(tmp_path / "target", TWO_LAYERS, 0)
    folders = target, write_model(tmp_path / "draft", OF_TWO_LAYERS | draft, 1)
    options = {"max_num_seqs": 1, "num_speculative_tokens": 5}
    narrow, wide = (LLM(*folders, **options, dtype=dtype) for dtype in ("auto", "float32"))
    of_target, of_draft = map(by_name, narrow.engine.runner.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(of_target)} == {jnp.dtype("float32")}
    for name, leaf in of_draft.items():
        is_matrix = name.endswith((*(f"['{x}']" for x in PROJECTIONS), "['lm_head']"))
        values = leaf.values if isinstance(leaf, Transposed) else leaf
        assert isinstance(leaf, Transposed) == is_matrix == (values.dtype == jnp.bfloat16), name
    head = by_name(wide.engine.runner.params[1]).get("['lm_head']", wide.engine.runner.params[0].get("lm_head"))
    np.testing.assert_array_equal(of_draft["['lm_head']"].values, head.T.astype(jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(wide.engine.runner.params[1]) if leaf.dtype != jnp.int32} == {
        jnp.dtype("float32")
    }
    outputs = [llm.generate(prompt(5, 6, 7), greedy(30)) for llm in (narrow, wide)]
    assert tokens_of(outputs[0]) == tokens_of(outputs[1])
