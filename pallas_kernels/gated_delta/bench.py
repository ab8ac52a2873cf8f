"""``python -m pallas_kernels.gated_delta.bench``: check verify of a layer, and time it beside a copy of its states.

With ``--prefill`` it is prefill, beside the layer's products (`bench_prompts`).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta import Kept, Weights, bench_prompts, mosaic, reference, triton
from pallas_kernels.gated_delta.prepare import Block, prepare
from pallas_kernels.lib import timing

HEADS = {"27b": (16, 48), "122b": (16, 64), "35b": (16, 32), "122b-tp2": (8, 32)}  # HK, HV; dk = dv = 128
Run = Callable[..., tuple[Any, Kept]]
LAYERS, SIZE, TAPE, TAPS = 12, 128, 16, 4
FORMS = ("recurrence", "rows", "tf32x3", "bf16x6", "bf16x3")


def case(model: str, layers: int, batch: int, tokens: int, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    """What is kept of a batch in several layers, the weights, and one block of each layer."""
    (HK, HV), P = HEADS[model], layers * batch
    channels, keys = 2 * SIZE + HV // HK * SIZE, iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape: int, dtype: Any = dtype) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    kept = Kept(
        normal(P, HV, SIZE, SIZE, dtype=jnp.float32),
        normal(P, TAPS - 1 + TAPE, HK, channels),
        normal(P, TAPE, HV, 2),
    )
    rates = jax.random.uniform(next(keys), (HV,), jnp.float32, -2, 2)
    weights = Weights(normal(HK, channels, TAPS) / 2, rates, normal(HV, dtype=jnp.float32))
    return kept, weights, normal(layers, batch, tokens, HK, channels), normal(layers, batch, tokens, HV, 2)


def check(model: str, name: str, verify: Run, fold: Callable[..., Kept], accepted: int) -> dict[str, Any]:
    """Errors of a kernel against plain JAX in float32, and whether folding gives the bits of decoding.

    Returns:
        Relative errors (norm over norm) of outputs and states, whether the states of decoded and of verified tokens
        have the same bits, and the share of outputs that differ between decoding and verifying in any bit, and once
        they are rounded to bfloat16.
    """
    kept, weights, inputs, gates = case(model, 1, 2, TAPE, jnp.float32)
    rows, none, some = jnp.arange(2), jnp.zeros(2, jnp.int32), jnp.full(2, accepted, jnp.int32)
    block = inputs[0], gates[0], jnp.full(2, TAPE, jnp.int32)
    outputs, verified = verify(kept, weights, rows, some, *block)
    expected, expected_kept = jax.jit(reference.verify)(kept, weights, rows, some, *block)
    folded = fold(verified, weights, rows, some, rows)
    decoded, alone = fold(kept, weights, rows, some, rows), []
    for t in range(accepted):
        token = inputs[0, :, t : t + 1], gates[0, :, t : t + 1]
        output, decoded = verify(decoded, weights, rows, none if t == 0 else none + 1, *token, none + 1)
        alone.append(output[:, 0])
    decoded = fold(decoded, weights, rows, none + 1, rows)
    one, other = np.stack(alone, 1), np.asarray(outputs[:, :accepted])
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in (one, other)]
    return {
        "check": name,
        "error of outputs": _error(outputs, expected),
        "error of states": _error(verified.state, expected_kept.state),
        "states as decoded": bool(np.array_equal(decoded.state, folded.state)),
        "outputs unlike decoded": round(float((one != other).mean()), 4),
        "in bfloat16": round(float((rounded[0] != rounded[1]).mean()), 4),
    }


def _error(found: jax.Array, expected: jax.Array) -> str:
    return f"{float(jnp.linalg.norm((found - expected).ravel()) / jnp.linalg.norm(expected.ravel())):.1e}"


def program(run: Run, batch: int) -> Any:
    """All layers, one behind the other, in one pool that is donated, as in an engine."""

    def layers(kept: Kept, weights: Weights, count: Any, inputs: Any, gates: Any, length: Any) -> Any:
        outputs = []
        for layer in range(LAYERS):
            rows = layer * batch + jnp.arange(batch, dtype=jnp.int32)
            output, kept = run(kept, weights, rows, count, inputs[layer], gates[layer], length)
            outputs.append(output)
        return outputs, kept

    return jax.jit(layers, donate_argnums=0)


def only_prepare(mixes: bool) -> Run:
    """The first kernel alone."""

    def run(kept: Kept, weights: Weights, rows: Any, count: Any, *block: Any) -> tuple[Any, Kept]:
        return prepare(kept, weights, rows, count, Block(*block), mixes=mixes, interpret=False), kept

    return run


def only_fold(fold: Callable[..., Kept]) -> Run:
    """Fold alone, into the same rows."""

    def run(kept: Kept, weights: Weights, rows: Any, count: Any, *block: Any) -> tuple[Any, Kept]:
        del block
        return count, fold(kept, weights, rows, count, rows)

    return run


def measure(args: argparse.Namespace, runs: dict[str, Run], batch: int, tokens: int) -> list[dict[str, Any]]:
    """Rows of one batch size; no layer's states are in L2 when it runs, as the layers before it took their place."""
    kept, *rest = case(args.model, LAYERS, batch, tokens)
    counts, length = jnp.full(batch, args.accepted, jnp.int32), jnp.full(batch, tokens, jnp.int32)
    call = rest[0], counts, rest[1], rest[2], length
    states = list(jnp.split(kept.state, LAYERS))
    copy = timing.seconds(jax.jit(lambda arrays: [jnp.copy(x) for x in arrays]), (states,), LAYERS, budget=0.05)
    del states
    lowered: dict[Any, Callable[[], Any]] = {
        name: functools.partial(program(run, batch).lower, kept, *call) for name, run in runs.items()
    }
    table, held = [], {"kept": kept}
    for name, compiled in timing.compile_all(lowered).items():

        def again(compiled: Any = compiled) -> Any:
            outputs, held["kept"] = compiled(held["kept"], *call)
            return outputs, held["kept"]

        time = timing.seconds(again, (), LAYERS, budget=0.05)
        table.append(
            {
                "batch": batch,
                "tokens": tokens,
                "accepted": args.accepted,
                "implementation": name,
                "us": round(time * 1e6, 1),
                "copy us": round(copy * 1e6, 1),
                "of a copy": round(copy / time, 2),
            }
        )
        print(" ".join(f"{x}" for x in table[-1].values()), flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", nargs=argparse.REMAINDER, help="check and time prefill; options of it follow")
    parser.add_argument("--model", default="27b", choices=list(HEADS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--accepted", type=int, default=6, help="tokens of the tape that are folded")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--columns", nargs="+", type=int, default=[triton.DEFAULT.columns])
    parser.add_argument("--warps", nargs="+", type=int, default=[triton.DEFAULT.num_warps])
    parser.add_argument("--reference", action="store_true", help="time plain JAX, too")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--json", default="gated_delta.json", help="where the rows go")
    args = parser.parse_args()
    if args.prefill is not None:
        bench_prompts.main(args.prefill)
        return
    cuts = [(columns, warps) for columns in args.columns for warps in args.warps]
    kernels: dict[str, tuple[Run, Callable[..., Kept]]] = {
        name: (functools.partial(mosaic.verify, pairs=pairs), mosaic.fold)
        for name, pairs in (("mosaic", False), ("mosaic pairs", True))
    }
    for config in (triton.Config(*cut, form) for cut in cuts for form in args.forms):
        cut = f"{config.form} {config.columns}x{config.num_warps}"
        kernels[cut] = functools.partial(triton.verify, config=config), functools.partial(triton.fold, config=config)
    for name, (verify, fold) in kernels.items() if not args.no_check else ():
        print(check(args.model, name, verify, fold, args.accepted), flush=True)
    runs: dict[str, Run] = {"reference": reference.verify} if args.reference else {}
    runs |= {name: verify for name, (verify, _) in kernels.items()}
    runs |= {f"fold {name}": only_fold(fold) for name, (_, fold) in kernels.items()}
    runs |= {"prepare": only_prepare(False), "prepare mixed": only_prepare(True)}
    table = [row for batch in args.batches for tokens in args.tokens for row in measure(args, runs, batch, tokens)]
    timing.save(args.json, table, model=args.model)
    print(timing.table(table))


if __name__ == "__main__":
    main()
