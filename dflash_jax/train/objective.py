"""What a drafter is trained on: blocks at random anchors, and a cross-entropy that weighs their positions."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.models.drafters.dflash import DraftModel
from dflash_jax.models.target import TargetModel
from dflash_jax.spec import DraftConfig, TargetConfig
from dflash_jax.train.cache import PackedBlocks, SequenceCache
from dflash_jax.weights.formats.weight import logits_of
from dflash_jax.weights.loader import Params

Loss = Literal["decay", "dpace"]
LOGITS_AT_ONCE = 2**29  # elements; the loss is computed in pieces of at most so many logits


class Batch(NamedTuple):
    """Sequences of prompt and response, and where their blocks begin.

    Attributes:
        tokens: ids, padded behind.
        lengths: tokens of each sequence.
        anchors: position of each block's first row; negative ones are no blocks.
    """

    tokens: Int[Array | np.ndarray, "B T"]
    lengths: Int[Array | np.ndarray, " B"]
    anchors: Int[Array | np.ndarray, "B A"]


class Measured(NamedTuple):
    """What one batch says of a drafter.

    Attributes:
        loss: the weighted mean cross-entropy.
        accuracy: share of position 1..G-1 of the blocks that is predicted right, whatever stands before it.
        acceptance_length: mean tokens a block would emit, the target's own included; a response's end cuts it short.
    """

    loss: Float[Array, ""]
    accuracy: Float[Array, " G-1"]
    acceptance_length: Float[Array, ""]


def target_features(params: Params, config: TargetConfig, taps: tuple[int, ...], tokens: Array | np.ndarray) -> Array:
    """Tapped hidden states [B, T, C] of whole sequences, in the parameters' dtype, as serving hands them over."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    model = TargetModel(config).bind({"params": params})
    _, features, _ = model(jnp.asarray(tokens), positions, SequenceCache(), taps)
    return jax.lax.stop_gradient(features)


def draft_hidden(
    params: Params,
    config: DraftConfig,
    features: Float[Array, "B T C"],
    block: Float[Array, "B A G D"],
    anchors: Int[Array, "B A"],
) -> Float[Array, "B A G D"]:
    """Hidden states of all blocks after the drafter's last norm, each as if it stood alone."""
    model = DraftModel(config).bind({"params": params})
    B, A, G, D = block.shape
    positions = jnp.broadcast_to(jnp.arange(features.shape[1]), features.shape[:2])
    context = model.write_context(features, positions, SequenceCache())
    assert isinstance(context, SequenceCache)
    rows = (anchors[..., None] + jnp.arange(G)).reshape(B, A * G)
    hidden, _ = model(block.reshape(B, A * G, D), rows, PackedBlocks(context, anchors))
    assert isinstance(hidden, Array), "what is trained is not quantised"
    return hidden.reshape(B, A, G, D)


def block_tokens(batch: Batch, G: int) -> tuple[Int[Array, "B A G"], Bool[Array, "B A G"]]:
    """The true tokens of every block, and which of them stand in its sequence."""
    rows = jnp.maximum(batch.anchors, 0)[..., None] + jnp.arange(G)
    inside = (rows < batch.lengths[:, None, None]) & (batch.anchors >= 0)[..., None]
    B, A, _ = rows.shape
    flat = jnp.minimum(rows, batch.tokens.shape[1] - 1).reshape(B, A * G)
    return jnp.take_along_axis(batch.tokens, flat, axis=1).reshape(B, A, G), inside


def decay_weights(G: int, gamma: float) -> Float[Array, " G-1"]:
    """exp(-(k - 1) / gamma) of slots k = 1..G-1. Source: arXiv 2602.06036, section 4.2."""
    return jnp.exp(-jnp.arange(G - 1) / gamma)


def dpace_weights(
    log_confidence: Float[Array, "*B G-1"], inside: Bool[Array, "*B G-1"], alpha: float
) -> Float[Array, "*B G-1"]:
    """Weights by the drafter's own confidence: position j counts as often as a block is expected to reach it or beyond.

    q~ = (1 - alpha) q + alpha; w_j = sum over m >= j of the product of q~_1 .. q~_m; no gradient flows through them.
    Source: D-PACE, arXiv 2605.18810, equations 7 and 8.
    """
    confidence = (1 - alpha) * jnp.exp(log_confidence) + alpha
    reached = jnp.cumprod(jnp.where(inside, confidence, 0.0), axis=-1)
    return jax.lax.stop_gradient(jnp.cumsum(reached[..., ::-1], axis=-1)[..., ::-1])


def block_loss(
    params: Params,
    batch: Batch,
    features: Float[Array, "B T C"],
    embedding: Float[Array, "V D"],
    head: Float[Array, "V D"],
    *,
    config: DraftConfig,
    loss: Loss,
    gamma: float,
    alpha: float,
) -> tuple[Float[Array, ""], Measured]:
    """Mean weighted cross-entropy of all blocks of a batch; embedding and head are the target's, and frozen.

    Args:
        params: the drafter's, in the dtype to compute in.
        batch: sequences and anchors.
        features: `target_features` of the sequences.
        embedding: the target's.
        head: the target's.
        config: of the drafter.
        loss: "decay" or "dpace".
        gamma: of `decay_weights`.
        alpha: of `dpace_weights`.
    """
    G = config.block_size
    labels, inside = block_tokens(batch, G)
    block = embedding[jnp.where(jnp.arange(G) == 0, labels, config.mask_token_id)]
    hidden = draft_hidden(params, config, features, block, jnp.maximum(batch.anchors, 0))
    labels, inside = labels[..., 1:], inside[..., 1:]
    losses, right = _cross_entropy(hidden[..., 1:, :], labels, head)
    weights = dpace_weights(-losses, inside, alpha) if loss == "dpace" else decay_weights(G, gamma) * inside
    value = (losses * weights).sum() / jnp.maximum(weights.sum(), 1e-6)
    right &= inside
    blocks = jnp.maximum(inside[..., 0].sum(), 1)
    accuracy = right.sum(axis=(0, 1)) / jnp.maximum(inside.sum(axis=(0, 1)), 1)
    accepted = jnp.cumprod(right, axis=-1).sum() / blocks
    return value, Measured(value, accuracy, 1.0 + accepted)


def _cross_entropy(
    hidden: Float[Array, "B A R D"], labels: Int[Array, "B A R"], head: Float[Array, "V D"]
) -> tuple[Float[Array, "B A R"], Bool[Array, "B A R"]]:
    """`token_losses` of every row of every block; never all logits at once."""
    B, A, R, D = hidden.shape
    logits = B * A * R * head.shape[0]
    pieces = next(n for n in range(1, A + 1) if A % n == 0 and (n == A or logits <= n * LOGITS_AT_ONCE))
    # Blocks come first, so that a split of B over devices stays.
    split = (
        hidden.reshape(B, pieces, A // pieces * R, D).swapaxes(0, 1),
        labels.reshape(B, pieces, A // pieces * R).swapaxes(0, 1),
    )
    losses, right = jax.lax.map(lambda piece: token_losses(*piece, head), split)
    return tuple(x.swapaxes(0, 1).reshape(B, A, R) for x in (losses, right))


@jax.custom_vjp
def token_losses(
    hidden: Float[Array, "B T D"], labels: Int[Array, "B T"], head: Float[Array, "V D"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Cross-entropy of every row, and whether no token is likelier than its label; the head gets no gradient."""
    return _losses_and_slopes(hidden, labels, head)[0]


def _losses_and_slopes(
    hidden: Float[Array, "B T D"], labels: Int[Array, "B T"], head: Float[Array, "V D"]
) -> tuple[tuple[Float[Array, "B T"], Bool[Array, "B T"]], Float[Array, "B T D"]]:
    """`token_losses` and the gradient of each row's loss by that row.

    Both come of the same logits: kept for the gradient they would fill the memory, and made again they would cost
    another product with the head.
    """
    logits = logits_of(hidden, head)
    of_label = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    highest = logits.max(axis=-1)
    likelihood = jnp.exp(logits - highest[..., None])
    total = likelihood.sum(axis=-1)
    # Rounded as the head is: the product runs on tensor cores in that dtype.
    expected = jnp.einsum(
        "btv,vd->btd",
        likelihood.astype(head.dtype),
        head,
        precision=jax.lax.Precision.HIGHEST if head.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    slopes = expected / total[..., None] - head[labels]
    return (jnp.log(total) + highest - of_label, of_label >= highest), slopes.astype(hidden.dtype)


def _scale_slopes(slopes: Float[Array, "B T D"], cotangents: tuple[Array, Array]) -> tuple[Array, None, None]:
    return (cotangents[0][..., None] * slopes).astype(slopes.dtype), None, None


token_losses.defvjp(_losses_and_slopes, _scale_slopes)
