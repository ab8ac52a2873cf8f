"""Which calls of few tokens the Mosaic experts in few bits take, and how they are cut up (``mosaic_few``)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.experts.shared import Shared
from pallas_kernels.lib.measured import MAX_STREAM_TOKENS, tokens_of
from pallas_kernels.lib.shared_memory import ALIGNED, SHARED_MEMORY
from pallas_kernels.quantized_product.layout import LONGEST, FewBits, places_of

ROWS = 64  # of a block: those of a wgmma
BLOCKS = 2  # of a tile, each a consumer's: gate and up, or outputs
TURNS = 2  # pairs of consumers
CONSUMERS = BLOCKS * TURNS
TILE = BLOCKS * ROWS
LEAST_TOKENS = 8  # fewer touch too few experts: one token of 122B over two takes 30.8 us, and Triton 27.7 (H200)
_MIN_STAGES = 2 * TURNS
_GROUPS = 2, 1  # of inputs that a step has: longer runs of a row are read faster
_BESIDE = 4096  # bytes of shared memory for lists of experts and pairs


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one of the two products is cut up.

    Attributes:
        tiles: of an expert, each of two blocks of 64 rows.
        of_shared: tiles of the shared expert, which come first; 0 if there is none.
        steps: of a tile.
        groups: of inputs that a step has.
        tokens: of the call, a multiple of 8.
        line: bytes of a row that a group has.
        is_alone: whether blocks are finished by themselves, as gate and up are not.
    """

    tiles: int
    of_shared: int
    steps: int
    groups: int
    tokens: int
    line: int
    is_alone: bool

    @property
    def depth(self) -> int:
        """Inputs of a step."""
        return LONGEST * self.groups

    @property
    def by_tile(self) -> bool:
        """Whether pairs of consumers take tiles in turns, not steps: the ring holds one of each, and no sums meet."""
        return self.is_alone and self._room >= TURNS * self.steps

    @property
    def stages(self) -> int:
        """Steps in the ring; a slot is always the same pair's, which waits for each of its fillings."""
        turn = TURNS * self.steps if self.by_tile else TURNS
        return self._room // turn * turn

    @property
    def _room(self) -> int:
        free = SHARED_MEMORY - 4 * (CONSUMERS - 1) * ROWS * self.tokens - _BESIDE
        return free // (self.groups * (TILE * self.line + 2 * self.tokens * LONGEST))

    def width(self, dtype: Any) -> int:
        """Elements of a dtype, each of one number or more, that a step has of a row."""
        return self.line * self.groups // int(jnp.dtype(dtype).itemsize)


def plans_of(x: Any, gate_up: FewBits, down: FewBits, shared: Shared | None) -> tuple[Plan, Plan]:
    """Plans of both products; groups of 128 inputs make M and D multiples of 128."""
    (_, _, M, D), tokens = gate_up.shape, -(-tokens_of(x) // ALIGNED) * ALIGNED

    def plan(weight: FewBits, inputs: int, tiles: int, *, is_alone: bool) -> Plan:
        line = LONGEST // places_of(weight.values) * int(weight.values.dtype.itemsize)
        of_shared = 0 if shared is None else tiles
        plans = [
            Plan(tiles, of_shared, inputs // (groups * LONGEST), groups, tokens, line, is_alone)
            for groups in _GROUPS
            if inputs % (groups * LONGEST) == 0
        ]
        return next((plan for plan in plans if plan.stages >= _MIN_STAGES), plans[-1])

    return plan(gate_up, D, M // ROWS, is_alone=False), plan(down, M, D // TILE, is_alone=True)


def refusal(x: Any, gate_up: Any, down: Any, chosen: Any, shared: Shared | None = None) -> str | None:
    """Why these kernels cannot do this call, or None."""
    if not (isinstance(gate_up, FewBits) and isinstance(down, FewBits)):
        return "The Mosaic experts of few tokens take gate_up and down in few bits, both."
    if x.dtype != jnp.bfloat16 or tokens_of(x) > MAX_STREAM_TOKENS:
        return (
            f"The Mosaic experts in few bits take up to {MAX_STREAM_TOKENS} tokens in bf16; these are {tokens_of(x)} "
            f"in {x.dtype}."
        )
    if groups := {weight.group for weight in (gate_up, down)} - {LONGEST}:
        return f"The Mosaic experts in few bits need groups of {LONGEST} inputs; these have {min(groups)}."
    X, P = gate_up.shape[0], chosen.size
    if (size := 4 * (X + 4) + 4 * (2 * P + 1)) > _BESIDE:  # of what `few_tiles.launch` keeps of them
        return (
            f"The Mosaic experts in few bits have {_BESIDE} bytes of shared memory for lists of experts and pairs; {X} "
            f"experts and {P} pairs take {size}."
        )
    if shared is None or _is_alike(shared, gate_up, down):
        return None
    return (
        f"The Mosaic experts in few bits need a shared expert as wide as the others, in as many bits, in parts of a "
        f"multiple of {ROWS} units; it is {list(shared.gate_up.shape)}, and they are {list(gate_up.shape)}."
    )


def slower(x: Any, gate_up: Any, down: Any, chosen: Any, shared: Shared | None = None) -> str | None:
    """Why Triton's experts are measured as fast (BENCH.md), or None; `refusal` may object all the same."""
    del gate_up, down, chosen, shared
    if not LEAST_TOKENS <= (tokens := tokens_of(x)) <= MAX_STREAM_TOKENS:
        return f"It was measured faster for {LEAST_TOKENS} to {MAX_STREAM_TOKENS} tokens; these are {tokens}."
    return None


def _is_alike(shared: Shared, gate_up: FewBits, down: FewBits) -> bool:
    """Whether a shared expert has tiles like those of the others."""
    for one, other in ((shared.gate_up, gate_up), (shared.down, down)):
        if not isinstance(one, FewBits) or one.is_packed != other.is_packed or one.group != LONGEST:
            return False
    return bool(shared.width == gate_up.shape[2] and shared.gate_up.shape[2] % ROWS == 0)
