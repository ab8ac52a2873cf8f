"""Both optimizers change a weight by about the learning rate; Muon turns every matrix of an array by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import ConfigError
from dflash_jax.spec import draft_config
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.state import make_optimizer
from dflash_jax.weights.parameters import build, parameters_of
from dflash_jax.weights.tables import checkpoint_table

DRAFT = draft_config(
    {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 64,
        "num_target_layers": 4,
        "block_size": 8,
        "attention_bias": True,
        "dflash_config": {"target_layer_ids": [1, 2], "mask_token_id": 63},
    },
    "test",
)
PARAMETERS = parameters_of(checkpoint_table(DRAFT), DRAFT)


def first_update(optimizer: str, **options):
    """The first update of weights of ones, at a learning rate of -1, for random gradients."""
    config = TrainConfig(target="t", data=("d",), out="o", optimizer=optimizer, **options)
    params = build(PARAMETERS, lambda parameter: jnp.ones(parameter.shape))
    keys = jax.random.split(jax.random.key(0), len(PARAMETERS))
    gradients = jax.tree.unflatten(
        jax.tree.structure(params),
        [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, jax.tree.leaves(params), strict=True)],
    )
    optimizer = make_optimizer(config, DRAFT)
    return jax.tree.map(np.asarray, optimizer.update(gradients, optimizer.init(params), params)[0]), gradients


def matrices(name: str, array: np.ndarray) -> list[np.ndarray]:
    """The matrices [outputs, inputs] in an array of the drafter's parameters."""
    if name in ("kv_proj", "gate_up_proj"):
        return [array[:, j].reshape(-1, array.shape[-1]) for j in range(array.shape[1])]
    return [array.reshape(array.shape[0], -1) if name in ("o_proj", "down_proj", "fc") else array.reshape(-1, 32)]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_changes_a_weight_by_about_the_learning_rate(optimizer):
    update, gradients = first_update(optimizer, max_grad_norm=1e6)
    for (path, array), gradient in zip(
        jax.tree_util.tree_leaves_with_path(update), jax.tree.leaves(gradients), strict=True
    ):
        assert 0.6 < np.sqrt((array**2).mean()) < 1.6, path
        assert (array * np.asarray(gradient)).sum() > 0, path  # uphill, since the learning rate is subtracted


def test_muon_makes_each_matrix_orthogonal():
    update, _ = first_update("muon")
    names = set()
    for path, array in jax.tree_util.tree_leaves_with_path(update):
        name = path[-1].key
        if name.endswith("proj") or name == "fc":
            names.add(name)
            for matrix in matrices(name, array):
                stretch = np.linalg.svd(matrix, compute_uv=False) / np.sqrt(max(matrix.shape))
                assert 0.4 < stretch.min() <= stretch.max() < 1.3, name
    assert names == {"fc", "q_proj", "kv_proj", "o_proj", "gate_up_proj", "down_proj"}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_matrices_alone_decay(optimizer):
    (with_decay, _), (without, _) = (first_update(optimizer, weight_decay=decay) for decay in (0.5, 0.0))
    for (path, mine), other in zip(
        jax.tree_util.tree_leaves_with_path(with_decay), jax.tree.leaves(without), strict=True
    ):
        name = path[-1].key
        expected = 0.5 if name.endswith("proj") or name == "fc" else 0.0
        np.testing.assert_allclose(mine - other, expected, atol=1e-5, err_msg=name)


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ConfigError, match="optimizer='sgd' is unknown; choose one of adamw, muon"):
        TrainConfig(target="t", data=("d",), out="o", optimizer="sgd")
