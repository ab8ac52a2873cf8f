"""``python -m pallas_kernels.experts.bench``: check the routed experts, and time them beside a copy.

Routing is of random tokens by a random router; each call of a program has tokens of its own. Bytes are those of the
experts that a call touches, as they are stored. `--tune` times each product by itself under many tiles.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.experts import FewBits, Implementation, experts, mosaic, triton
from pallas_kernels.experts.config import MANY_ROWS, Config, Tile, default_config, fitted
from pallas_kernels.experts.sort import MOST_ROWS
from pallas_kernels.lib import timing
from pallas_kernels.quantized_product.layout import PLACES, PLACES_E4M3

MODELS = {  # X, M, D
    "35b": (256, 512, 2048),
    "122b": (256, 1024, 3072),
    "122b-tp2": (256, 512, 3072),
    "122b-tp4": (256, 256, 3072),
}
KINDS = ("bf16", "fp8", "int4", "zeros")  # the last has 4 bits and zero points
GROUP = 128  # inputs that share a scale
CHOSEN = 8
FEW_TILES = [  # rows, depth, steps in flight, warps
    Tile(*numbers)
    for numbers in (
        (32, 64, 6), (32, 128, 4), (32, 128, 6), (32, 256, 3), (64, 64, 4), (64, 64, 6), (64, 128, 3), (64, 128, 4),
        (64, 256, 2), (128, 64, 4), (128, 128, 3), (32, 128, 4, 8), (64, 128, 4, 8), (128, 64, 4, 8),
    )
]  # fmt: skip
WIDE_TILES = [
    Tile(*numbers)
    for numbers in (
        (64, 64, 3), (64, 64, 4), (64, 64, 4, 8), (128, 32, 4, 8), (128, 64, 2, 8), (128, 64, 3, 8), (128, 64, 4, 8),
        (256, 32, 3, 8), (256, 64, 3, 8),
    )
]  # fmt: skip
FEW_BITS_TILES = [
    Tile(*numbers)
    for numbers in itertools.product((32, 64, 128), (64, 128), (3, 4, 6, 8), (4,))
    if numbers[0] * numbers[1] < 128 * 128 or numbers[2] < 8
]
WIDE_FEW_BITS_TILES = [Tile(*numbers) for numbers in itertools.product((64, 128), (64, 128), (2, 3, 4), (4, 8))]
Weight = Array | FewBits
IN_FEW_BITS: tuple[Implementation, ...] = ("triton",)


class Case(NamedTuple):
    """Random weights of a layer, and the tokens of several calls.

    Attributes:
        gate_up: [X, 2, M, D].
        down: [X, D, M].
        hidden: [P, M], hidden units for the second product by itself.
        calls: (x, chosen, weights) of each call.
    """

    gate_up: Weight
    down: Weight
    hidden: Array
    calls: list[tuple[Array, Array, Array]]

    @property
    def touched(self) -> float:
        """Experts that a call touches, a mean."""
        return float(np.mean([len(np.unique(np.asarray(chosen))) for _, chosen, _ in self.calls]))

    @property
    def rows(self) -> int:
        """Pairs of a call."""
        return int(self.calls[0][1].size)


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(key: Array, shape: tuple[int, ...], deviation: float) -> Array:
    return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(deviation)


@jax.jit
def route(x: Array, router: Array) -> tuple[Array, Array]:
    """Experts of each token, and their weights."""
    logits = jnp.dot(x, router.T, preferred_element_type=jnp.float32)
    best, chosen = jax.lax.top_k(jax.nn.softmax(logits), CHOSEN)
    return chosen.astype(jnp.int32), best / jnp.sum(best, axis=-1, keepdims=True)


@functools.partial(jax.jit, static_argnums=(1, 2))
def few_bits(key: Array, shape: tuple[int, ...], kind: str) -> FewBits:
    """A random weight whose products have a deviation of about 1."""
    keys = jax.random.split(key, 3)
    of_groups = (*shape[:-1], shape[-1] // GROUP)
    scales = jax.random.uniform(keys[0], of_groups, jnp.float32, 0.5, 1.5) * shape[-1] ** -0.5 / 4
    words = jax.random.bits(keys[1], (*shape[:-1], shape[-1] // (PLACES_E4M3 if kind == "fp8" else PLACES)), jnp.uint16)
    if kind == "fp8":  # numbers up to 240 instead of -8 to 7, and no NaN: a bit of each exponent is 0
        return FewBits(jax.lax.bitcast_convert_type(words & 0xFF77, jnp.int16), (scales / 16).astype(jnp.bfloat16))
    points = jax.random.randint(keys[2], of_groups, 1, 17, jnp.int32).astype(jnp.uint8)
    return FewBits(words, scales.astype(jnp.float16), points if kind == "zeros" else None)


def weights_of(model: str, kind: str) -> tuple[Weight, Weight, Array]:
    """Weights of gate and up, of down, and of the router."""
    X, M, D = MODELS[model]
    keys = jax.random.split(jax.random.key(0), 3)
    router = normal(keys[2], (X, D), D**-0.5)
    if kind != "bf16":
        return few_bits(keys[0], (X, 2, M, D), kind), few_bits(keys[1], (X, D, M), kind), router
    return normal(keys[0], (X, 2, M, D), D**-0.5), normal(keys[1], (X, D, M), M**-0.5), router


def case_of(weights: tuple[Weight, Weight, Array], tokens: int) -> Case:
    gate_up, down, router = weights
    calls = 16 if tokens == 1 else (8 if tokens <= 256 else 2)
    xs = [normal(key, (tokens, gate_up.shape[-1]), 1.0) for key in jax.random.split(jax.random.key(tokens), calls)]
    hidden = normal(jax.random.key(1), (tokens * CHOSEN, down.shape[-1]), 1.0)
    return Case(gate_up, down, hidden, [(x, *route(x, router)) for x in xs])


class Lowered(NamedTuple):
    """A lowered program; what the GPU cannot hold is a NotImplementedError, which ``timing.compile_all`` reports."""

    lowered: Any

    def compile(self) -> Any:
        try:
            return self.lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            raise NotImplementedError(str(error).splitlines()[0][:200]) from error


Run = Callable[..., Any]  # takes weights, hidden units, and (x, chosen, weights) of a call


def whole(implementation: Implementation) -> Run:
    """A call of the operation."""

    def run(gate_up: Weight, down: Weight, hidden: Array, x: Array, chosen: Array, weights: Array) -> Array:
        del hidden
        return experts(x, gate_up, down, chosen, weights, implementation=implementation)

    return run


def whole_mosaic(config: mosaic.Config) -> Run:
    """A call of the Mosaic kernels with other tiles."""

    def run(gate_up: Weight, down: Weight, hidden: Array, x: Array, chosen: Array, weights: Array) -> Array:
        del hidden
        return mosaic.experts(x, gate_up, down, chosen, weights, config=config)

    return run


def one_step(step: str, config: Config) -> Run:
    """One of Triton's kernels by itself, after the sorting."""

    @jax.jit
    def run(gate_up: Weight, down: Weight, hidden: Array, x: Array, chosen: Array, weights: Array) -> Any:
        work = triton.plan(chosen, down.shape[0], config, interpret=False)
        if step == "sort":
            return work.operands
        if step == "gate_up":
            return triton.gate_up_product(x, gate_up, None, work, CHOSEN, config.gate_up, interpret=False)
        dtype = jnp.float32 if config.tokens < MANY_ROWS else x.dtype
        return triton.down_product([hidden], down, weights, None, work, config.down, dtype, interpret=False)

    return run


def variants(tokens: int, case: Case, args: argparse.Namespace) -> Iterator[tuple[str, str, Run]]:
    """What is timed for a number of tokens: the step, the configuration in words, the function."""
    weights = case.gate_up, case.down
    default, is_wide = default_config(tokens, CHOSEN, *weights), not isinstance(case.gate_up, FewBits)
    for implementation in args.implementations if is_wide else IN_FEW_BITS:
        yield "experts", implementation, whole(implementation)
    if not args.tune:
        return
    for rows in args.rows or [default.tokens]:
        tiles = (FEW_TILES, WIDE_TILES) if is_wide else (FEW_BITS_TILES, WIDE_FEW_BITS_TILES)
        for tile in tiles[rows >= 64]:
            config = fitted(Config(rows, tile, tile), *weights)
            for step, words in (("gate_up", config.gate_up), ("down", config.down)):
                yield step, f"{rows}: {'x'.join(map(str, words))}", one_step(step, config)
    if tokens > 16:
        yield "sort", "", one_step("sort", default)
    if "mosaic" in args.implementations and default.tokens == MOST_ROWS and is_wide:
        for cuts in mosaic_tiles(*case.gate_up.shape[2:]):
            cut = " ".join(f"{tile.rows}x{tile.columns}x{tile.step}" for tile in cuts)
            yield "experts", f"mosaic {cut}", whole_mosaic(cuts)


def mosaic_tiles(width: int, inputs: int) -> Iterator[mosaic.Config]:
    """The default tiles with another one in the place of each."""
    default = mosaic.default_config(width, inputs)
    for units in (64, 96, 128):
        yield default._replace(gate_up=mosaic.gate_up_tile(units))
    for columns in (128, 192, 256):
        yield default._replace(down=mosaic.down_tile(columns))


def kernels(compiled: Any) -> int:
    """Kernels that a program launches, about: what its entry calls."""
    entry = compiled.as_text().split("ENTRY ")[-1]
    return len(re.findall(r" (?:fusion|custom-call|sort|scatter|gather|reduce|copy|dot|while)\(", entry))


def bytes_of(weight: Weight) -> int:
    """Bytes of the matrices of an expert, with their scales and zero points."""
    return sum(part.nbytes for part in jax.tree.leaves(weight)) // weight.shape[0]


def measure(
    model: str, kind: str, tokens: int, weights: Any, copy: float, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Rows of one model, kind of weights and number of tokens."""
    case, (_, M, D) = case_of(weights, tokens), MODELS[model]
    runs = {(step, words): run for step, words, run in variants(tokens, case, args)}
    read = {"gate_up": bytes_of(case.gate_up), "down": bytes_of(case.down), "sort": 0}  # of each expert, by the step
    read["experts"] = read["gate_up"] + read["down"]

    def lower(run: Run) -> Any:
        def program(case: Case) -> Any:
            return [run(*case[:3], *call) for call in case.calls]

        return Lowered(jax.jit(program).lower(case))

    shares = {"experts": 3, "gate_up": 2, "down": 1, "sort": 0}  # matrices of M D that a step reads of each expert
    lowered: dict[Any, Callable[[], Any]] = {key: functools.partial(lower, run) for key, run in runs.items()}
    for (step, words), program in timing.compile_all(lowered).items():
        row: dict[str, Any] = {"model": model, "kind": kind, "tokens": tokens, "touched": round(case.touched, 1)}
        row |= {"step": step, "config": words}
        if isinstance(program, str):
            print(*row.values(), program, flush=True)
            continue
        try:
            seconds = timing.seconds(program, (case,), len(case.calls), budget=args.budget)
        except jax.errors.JaxRuntimeError as error:  # a tile that does not fit
            print(*row.values(), str(error).splitlines()[0][:150], flush=True)
            continue
        numbers = shares[step] * M * D
        rate = case.touched * read[step] / seconds
        row |= {"us": round(seconds * 1e6, 1), "GB/s": round(rate / 1e9), "of a copy": round(rate / copy, 3)}
        row |= {"TFLOP/s": round(2e-12 * case.rows * numbers / seconds, 1)}
        row["kernels"] = round(kernels(program) / len(case.calls), 1)
        print(*row.values(), flush=True)
        yield row


def dense(model: str, pairs: int) -> dict[str, Any]:
    """XLA's product of as many rows by one expert's gate and up, for its TFLOP/s."""
    _, M, D = MODELS[model]
    x, weight = normal(jax.random.key(1), (pairs, D), 1.0), normal(jax.random.key(2), (2 * M, D), D**-0.5)
    program = jax.jit(lambda x, weight: x @ weight.T).lower(x, weight).compile()
    seconds = timing.seconds(program, (x, weight), 1)
    return {"model": model, "pairs": pairs, "dense TFLOP/s": round(4e-12 * pairs * M * D / seconds, 1)}


def check(model: str, kind: str, weights: Any, args: argparse.Namespace) -> None:
    """Print errors against plain JAX, and of many tokens against the last of them alone."""
    gate_up, down, router = weights
    for implementation in args.implementations if kind == "bf16" else IN_FEW_BITS:
        for tokens in (1, 5, 16, 17, 32, 64, 300, 1024, 4096):
            x = normal(jax.random.key(tokens), (tokens, gate_up.shape[-1]), 1.0)
            chosen, scales = route(x, router)
            chosen = chosen.at[tokens // 2, 1].set(-1)
            call = x, gate_up, down, chosen, scales
            try:
                out = experts(*call, implementation=implementation)
            except NotImplementedError as refusal:
                print(f"check {model} {kind} {implementation} {tokens}: {refusal}", flush=True)
                continue
            wanted = jax.jit(functools.partial(experts, implementation="reference"))(*call)
            few = [x[-16:], gate_up, down, chosen[-16:], scales[-16:]]
            alone = experts(*few, implementation=implementation)
            print(
                f"check {model} {kind} {implementation} {tokens}: error {error(out, wanted):.1e}, "
                f"last alone {error(alone, out[-16:]):.1e}, bits differ {float(jnp.mean(alone != out[-16:])):.4f}",
                flush=True,
            )


def error(out: Array, wanted: Array) -> float:
    """Relative error, norm over norm."""
    out, wanted = out.astype(jnp.float32), wanted.astype(jnp.float32)
    return float(jnp.linalg.norm((out - wanted).ravel()) / jnp.linalg.norm(wanted.ravel()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["35b", "122b"], choices=list(MODELS))
    parser.add_argument("--kinds", nargs="+", default=["bf16"], choices=KINDS, help="of the weights")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 256, 8192])
    parser.add_argument("--implementations", nargs="+", default=["triton"], help="of 16 bits, timed whole")
    parser.add_argument("--tune", action="store_true", help="time the products by themselves under many tiles")
    parser.add_argument("--rows", nargs="+", type=int, help="of a block, for --tune; else what a call would have")
    parser.add_argument("--budget", type=float, default=0.02, help="seconds of each of five series")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--json", default="experts.json", help="where the rows go")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    copy = timing.copy_bandwidth()
    print(f"copy {copy / 1e9:.0f} GB/s", flush=True)
    for model in args.models:
        for kind in args.kinds:
            weights = weights_of(model, kind)
            if not args.no_check:
                check(model, kind, weights, args)
            for tokens in args.tokens:
                rows += measure(model, kind, tokens, weights, copy, args)
            del weights
        print(dense(model, CHOSEN * max(args.tokens)), flush=True)
    timing.save(args.json, rows, copy_bandwidth=round(copy / 1e9))
    print(timing.table(rows))


if __name__ == "__main__":
    main()
