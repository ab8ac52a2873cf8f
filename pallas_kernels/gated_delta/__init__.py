"""Gated DeltaNet: convolution, gates and recurrence over verified blocks, and over prompts.

Letters beside the project's: HK and HV key and value heads (value head h reads key head h // r, r = HV // HK), dk and
dv their sizes, c = 2 dk + r dv channels of one key head: its query, its key, and the values of its r value heads. The
convolution has I taps and looks J = I - 1 tokens back; a tape has G tokens.
"""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import registry
from pallas_kernels.gated_delta.reference import CHUNK, Kept, Weights
from pallas_kernels.registry import AMPERE_ON, HOPPER

__all__ = ["CHUNK", "FOLD", "PREFILL", "VERIFY", "Kept", "Weights", "fold", "prefill", "verify"]

Implementation = Literal["mosaic", "triton", "reference"]


def _operation(name: str, *faster: registry.Implementation, module: str = "triton") -> registry.Operation:
    kernel = registry.Implementation(
        "triton", f"pallas_kernels.gated_delta.{module}:{name}", AMPERE_ON, refusal="refusal", interprets=True
    )
    plain = registry.Implementation("reference", f"pallas_kernels.gated_delta.reference:{name}")
    return registry.Operation(f"gated_delta_{name}", (*faster, kernel, plain))


def _on_hopper(name: str) -> registry.Implementation:
    return registry.Implementation("mosaic", f"pallas_kernels.gated_delta.mosaic:{name}", HOPPER, refusal="refusal")


# A call is (kept, weights).
VERIFY, FOLD = _operation("verify", _on_hopper("verify")), _operation("fold", _on_hopper("fold"))
PREFILL = _operation("prefill", module="prompts")


def verify(
    kept: Kept,
    weights: Weights,
    rows: Int[Array, " B"],
    count: Int[Array, " B"],
    inputs: Float[Array, "B T HK _"],
    gates: Float[Array, "B T HV 2"],
    length: Int[Array, " B"],
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T HV dv"], Kept]:
    """Fold the accepted tokens of each sequence's tape into its state, then run its next block, the new tape.

    A block of one token is a decoding step. The state after a token has the same bits whether it came alone or in a
    block, on the reference on CPUs and on each kernel. Donate `kept` to the ``jit`` around and use only the one that is
    returned: then it is written in place.

    Args:
      kept: what the layers keep of sequences.
      weights: of the layer.
      rows: of the sequences, none twice; outside 0..P-1 is padding, which writes nothing, with outputs of no meaning.
      count: tokens of the tape that were accepted, 0..G; they are folded into the state.
      inputs: of the convolution, of the block's tokens: the first c channels of each key head; others are not read.
      gates: their projections (b, a).
      length: tokens of each block, 0..T; what follows them is padding, whose outputs mean nothing.
      implementation: ``"mosaic"``, ``"triton"`` or ``"reference"``; None picks Mosaic on Hopper, where heads of 128 and
        tapes of at most 16 tokens let it, and Triton on other NVIDIA GPUs from sm_80 on. They must not be mixed for one
        sequence if its states are to have the same bits.
      interpret: run the Triton kernel in Pallas' interpreter, on any backend (tests).

    Returns:
      Outputs of the block's tokens in the dtype of the inputs, and what is kept now: the state after the accepted
      tokens, the inputs of the J tokens before the block, and the block as the new tape.

    Raises:
      ValueError: shapes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.

    Source: arXiv 2412.06464; channels as transformers' `qwen3_5`, grouped by key head.
    """
    _check(kept, weights, (rows, count, length), inputs, gates)
    if inputs.shape[1] > kept.gates.shape[1]:
        raise ValueError(f"a block must fit the tape of {kept.gates.shape[1]} tokens; got {inputs.shape[1]}")
    run = VERIFY.function(implementation, (kept, weights), interpret=interpret)
    outcome: tuple[Array, Kept] = run(kept, weights, rows, count, inputs, gates, length)
    return outcome


def fold(
    kept: Kept,
    weights: Weights,
    rows: Int[Array, " B"],
    count: Int[Array, " B"],
    targets: Int[Array, " B"],
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Kept:
    """Write the state after the first tokens of tapes to other rows: snapshots of sequences.

    Args:
      kept: what the layers keep of sequences.
      weights: of the layer.
      rows: of the sequences, which stay as they are; outside 0..P-1 is padding, which writes nothing.
      count: tokens of the tape to fold, 0..G.
      targets: rows to write, none twice, each outside `rows` or the sequence's row; outside 0..P-1 writes nothing.
      implementation: as for `verify`.
      interpret: as for `verify`.

    Returns:
      What is kept now: targets have the state and the inputs of the J tokens before that point, and an empty tape: only
      a `count` of 0 is right for them.

    Raises:
      ValueError: shapes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.
    """
    _check(kept, weights, (rows, count, targets))
    run = FOLD.function(implementation, (kept, weights), interpret=interpret)
    outcome: Kept = run(kept, weights, rows, count, targets)
    return outcome


def prefill(
    kept: Kept,
    weights: Weights,
    rows: Int[Array, " B"],
    is_first: Bool[Array, " B"],
    inputs: Float[Array, "B T HK _"],
    gates: Float[Array, "B T HV 2"],
    length: Int[Array, " B"],
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T HV dv"], Kept]:
    """Run tokens of prompts in chunks of 64, each a few matrix products.

    Args:
      kept: what the layers keep of sequences; donate it as for `verify`.
      weights: of the layer.
      rows: of the sequences, none twice, their tapes empty; outside 0..P-1 is padding, as for `verify`.
      is_first: whether the tokens begin the sequence: then what the row has is not read.
      inputs: of the convolution, of the tokens, as for `verify`.
      gates: their projections (b, a).
      length: tokens of each sequence, 0..T; what follows them is padding, whose outputs mean nothing. A sequence
        without tokens changes nothing.
      implementation: as for `verify`; only the reference has gradients.
      interpret: as for `verify`.

    Returns:
      Outputs in the dtype of the inputs, and what is kept now: the state after the tokens, the inputs of the last J of
      them, and an empty tape: only a `count` of 0 is right for it.

    Raises:
      ValueError: shapes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.

    Source: as for `verify`.
    """
    _check(kept, weights, (rows, is_first, length), inputs, gates)
    run = PREFILL.function(implementation, (kept, weights), interpret=interpret)
    outcome: tuple[Array, Kept] = run(kept, weights, rows, is_first, inputs, gates, length)
    return outcome


def _check(kept: Kept, weights: Weights, vectors: tuple[Any, ...], inputs: Any = None, gates: Any = None) -> None:
    """Raise ValueError for shapes or dtypes that do not belong together."""
    (P, HV, dk, dv), (HK, c, taps) = kept.state.shape, weights.conv.shape
    G = kept.gates.shape[1]
    if HV % HK or c != 2 * dk + HV // HK * dv:
        raise ValueError(
            f"conv must be [HK, 2 dk + HV / HK dv, I] for states [P, HV, dk, dv]; got {[HK, c, taps]} and "
            f"{[P, HV, dk, dv]}"
        )
    B = vectors[0].size
    wanted = {
        "state": (kept.state, (P, HV, dk, dv)),
        "kept inputs": (kept.inputs, (P, taps - 1 + G, HK, c)),
        "kept gates": (kept.gates, (P, G, HV, 2)),
        "A_log": (weights.A_log, (HV,)),
        "dt_bias": (weights.dt_bias, (HV,)),
        **{f"vector {i} of the sequences": (vector, (B,)) for i, vector in enumerate(vectors)},
    }
    if inputs is not None:
        *outer, channels = inputs.shape
        if outer[::2] != [B, HK] or len(outer) != 3 or channels < c:
            raise ValueError(f"inputs must be [{B}, T, {HK}, {c} or more]; got {list(inputs.shape)}")
        wanted["gates"] = gates, (B, outer[1], HV, 2)
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}; got {list(array.shape)}")
    if kept.state.dtype != jnp.float32:
        raise ValueError(f"states must be float32; got {kept.state.dtype}")
