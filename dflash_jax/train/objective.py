"""The training objective: blocks at random anchors, and a cross-entropy that weighs their positions."""

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
LOGITS_AT_ONCE = 2**29  # float32 elements, 2 GiB


class Batch(NamedTuple):
    """Sequences of prompt and response, and where their blocks begin.

    Attributes:
        tokens: ids, int32; padding comes behind them.
        lengths: tokens of each sequence.
        anchors: position of the first row of each block; negative ones stand for no block.
    """

    tokens: Int[Array | np.ndarray, "B T"]
    lengths: Int[Array | np.ndarray, " B"]
    anchors: Int[Array | np.ndarray, "B A"]


class Measured(NamedTuple):
    """Figures of one batch.

    Attributes:
        loss: weighted mean cross-entropy.
        accuracy: share of blocks that predict row 1..G-1 right, whatever the rows before it predict.
        acceptance_length: mean tokens that a block would emit, the target's own included; the end of a response cuts it
            short.
    """

    loss: Float[Array, ""]
    accuracy: Float[Array, " G-1"]
    acceptance_length: Float[Array, ""]


def target_features(params: Params, config: TargetConfig, taps: tuple[int, ...], tokens: Array | np.ndarray) -> Array:
    """Outputs of the capture layers [B, T, C] of whole sequences, in the dtype of the parameters, as serving has them.

    Args:
        params: the target's.
        config: the target's.
        taps: capture layers; the last one of the target stands for its final hidden states.
        tokens: ids [B, T].
    """
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
    """Hidden states of all blocks after the drafter's last norm; each block is computed as if it stood alone.

    Args:
        params: the drafter's.
        config: the drafter's.
        features: `target_features` of the sequences.
        block: embeddings of the rows of the blocks.
        anchors: position of the first row of each block; not negative.
    """
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
    """The true tokens of every block, and which of them lie inside of the response."""
    rows = jnp.maximum(batch.anchors, 0)[..., None] + jnp.arange(G)
    inside = (rows < batch.lengths[:, None, None]) & (batch.anchors >= 0)[..., None]
    B, A, _ = rows.shape
    flat = jnp.minimum(rows, batch.tokens.shape[1] - 1).reshape(B, A * G)
    return jnp.take_along_axis(batch.tokens, flat, axis=1).reshape(B, A, G), inside


def decay_weights(G: int, gamma: float) -> Float[Array, " G-1"]:
    """Weights exp(-(k - 1) / gamma) of rows k = 1..G-1. Source: arXiv 2602.06036, section 4.2."""
    return jnp.exp(-jnp.arange(G - 1) / gamma)


def dpace_weights(
    log_confidence: Float[Array, "*B G-1"], inside: Bool[Array, "*B G-1"], alpha: float
) -> Float[Array, "*B G-1"]:
    """Weights by the drafter's own confidence: how often, by expectation, a block reaches row j or one behind it.

    q~ = (1 - alpha) q + alpha; w_j = sum over m >= j of the product of q~_1 .. q~_m; no gradient flows through them.
    Source: D-PACE, arXiv 2605.18810, equations 7 and 8.

    Args:
        log_confidence: log-probability q of the true token of each row, float32.
        inside: rows that count.
        alpha: 0 to 1.
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
    """Weighted mean cross-entropy of all blocks of a batch. The target's embedding and head are frozen.

    Args:
        params: the drafter's, in the dtype to compute in.
        batch: sequences and anchors.
        features: `target_features` of the sequences.
        embedding: the target's.
        head: the target's.
        config: the drafter's.
        loss: "decay" or "dpace".
        gamma: see `decay_weights`.
        alpha: see `dpace_weights`.

    Returns:
        The loss, float32, and the figures of the batch.
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
    """`token_losses` of every row of every block, computed in pieces of at most `LOGITS_AT_ONCE` logits."""
    B, A, R, D = hidden.shape
    logits = B * A * R * head.shape[0]
    pieces = next(n for n in range(1, A + 1) if A % n == 0 and (n == A or logits <= n * LOGITS_AT_ONCE))
    # Pieces split the blocks, not the sequences, so that a sharding of B over devices stays.
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
    """Cross-entropy of every row, float32, and whether its label is the argmax; the head gets no gradient.

    Args:
        hidden: rows.
        labels: the true token of each row.
        head: the target's.
    """
    return _losses_and_slopes(hidden, labels, head)[0]


def _losses_and_slopes(
    hidden: Float[Array, "B T D"], labels: Int[Array, "B T"], head: Float[Array, "V D"]
) -> tuple[tuple[Float[Array, "B T"], Bool[Array, "B T"]], Float[Array, "B T D"]]:
    """`token_losses`, and the gradient of each row's loss by that row.

    Both are computed from the same logits: keeping logits for the gradient would fill the memory, and computing them
    again would cost another product with the head.
    """
    logits = logits_of(hidden, head)
    of_label = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    highest = logits.max(axis=-1)
    likelihood = jnp.exp(logits - highest[..., None])
    total = likelihood.sum(axis=-1)
    # In the dtype of the head, in which the product runs on tensor cores.
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
