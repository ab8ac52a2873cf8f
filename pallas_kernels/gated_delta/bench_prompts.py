"""``python -m pallas_kernels.gated_delta.bench --prefill``: check prefill, and time it beside the layer's products."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta import Kept, Weights, prompts, reference
from pallas_kernels.gated_delta.chunks import Chunks, Config, prepare_chunks, shapes_of
from pallas_kernels.gated_delta.prepare import Block
from pallas_kernels.lib import timing

# A layer of Qwen3.6-27B: key and value heads, their size, taps, tape, and widths of the model and of its MLP.
HK, HV, SIZE, TAPS, TAPE, WIDTH, HIDDEN = 16, 48, 128, 4, 16, 5120, 17408
CHANNELS = 2 * SIZE + HV // HK * SIZE
LAYERS = 4  # in a program, one behind the other, in one pool
FORMS = ("bf16", "bf16x2", "tf32x3", "bf16x6")
SIZES = ((1, 1024), (1, 8192), (4, 2048))  # B, T

Case = tuple[Kept, Weights, Block]


def case(B: int, T: int, dtype: Any = jnp.bfloat16, rates: tuple[float, float] = (-2, 2)) -> Case:
    """What is kept of a batch in several layers, the weights, and tokens of every sequence."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape: int, dtype: Any = dtype) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    rows = LAYERS * B
    state, inputs = normal(rows, HV, SIZE, SIZE, dtype=jnp.float32), normal(rows, TAPS - 1 + TAPE, HK, CHANNELS)
    kept = Kept(state / 10, inputs, normal(rows, TAPE, HV, 2))
    A_log = jax.random.uniform(next(keys), (HV,), jnp.float32, *rates)
    weights = Weights(normal(HK, CHANNELS, TAPS) / 2, A_log, normal(HV, dtype=jnp.float32))
    return kept, weights, Block(normal(B, T, HK, CHANNELS), normal(B, T, HV, 2), jnp.full(B, T, jnp.int32))


def check(config: Config, rates: tuple[float, float]) -> dict[str, Any]:
    """Errors of a configuration against plain JAX, of ragged sequences of which some begin.

    Returns:
        The largest difference of outputs, errors of outputs and states (norm over norm), and whether the outputs of
        padding are zeros and rows of other sequences and the kept inputs as they must be.
    """
    dtype = jnp.float32 if config.form in FORMS[2:] else jnp.bfloat16
    kept, weights, block = case(4, 700, dtype, rates)
    block = block._replace(length=jnp.array([700, 64, 129, 0], jnp.int32))
    call = jnp.array([9, 3, 5, 7]), jnp.array([False, True, False, False]), *block
    outputs, after = prompts.prefill(kept, weights, *call, config=config)
    expected, wanted = jax.jit(reference.prefill)(kept, weights, *call)
    is_token = (jnp.arange(700) < block.length[:, None])[..., None, None]
    ours, theirs = (jnp.where(is_token, x.astype(jnp.float32), 0) for x in (outputs, expected))
    written, others = jnp.array([9, 3, 5]), jnp.array([i for i in range(LAYERS * 4) if i not in (9, 3, 5)])
    return {
        "check": config.form,
        "log rates": rates,
        "largest output": float(jnp.abs(theirs).max()),
        "largest difference": f"{float(jnp.abs(ours - theirs).max()):.1e}",
        "error of outputs": _error(ours, theirs),
        "error of states": _error(after.state[written], wanted.state[written]),
        "zeros behind": bool((jnp.where(is_token, 0, outputs) == 0).all()),
        "others as before": bool((after.state[others] == kept.state[others]).all()),
        "kept inputs": bool((after.inputs == wanted.inputs).all()),
    }


def _error(ours: jax.Array, theirs: jax.Array) -> str:
    return f"{float(jnp.linalg.norm((ours - theirs).ravel()) / jnp.linalg.norm(theirs.ravel())):.1e}"


def layers(run: Callable[[Kept, Any], tuple[Any, Kept]], B: int) -> Any:
    """A program of several layers whose kept rows are donated, as in an engine."""

    def program(kept: Kept, *arguments: Any) -> tuple[Any, Kept]:
        outputs = []
        for layer in range(LAYERS):
            output, kept = run(kept, layer * B + jnp.arange(B, dtype=jnp.int32), *arguments)
            outputs.append(output)
        return outputs, kept

    return jax.jit(program, donate_argnums=0)


def whole(config: Config | None) -> Callable[..., Any]:
    """All kernels of a layer; None is plain JAX."""

    def run(kept: Kept, rows: Any, weights: Weights, block: Block) -> tuple[Any, Kept]:
        function = reference.prefill if config is None else functools.partial(prompts.prefill, config=config)
        return function(kept, weights, rows, jnp.zeros(len(rows), bool), *block)

    return run


def only_chunks(config: Config) -> Callable[..., Any]:
    """The first two kernels."""

    def run(kept: Kept, rows: Any, weights: Weights, block: Block) -> tuple[Any, Kept]:
        is_first = jnp.zeros(len(rows), bool)
        return prepare_chunks(kept, weights, rows, is_first, block, config=config, interpret=False), kept

    return run


def only_carry(config: Config) -> Callable[..., Any]:
    """The third kernel, of the chunks that it is given."""

    def run(kept: Kept, rows: Any, chunks: Chunks, block: Block) -> tuple[Any, Kept]:
        options: dict[str, Any] = {"config": config, "interpret": False}
        is_first = jnp.zeros(len(rows), bool)
        return prompts.carry_state(kept, rows, is_first, block, chunks, block.inputs.dtype, **options)

    return run


def times(runs: dict[Any, tuple[Callable[..., Any], Any, Block]], B: int) -> dict[Any, float]:
    """Microseconds a layer of each run that compiles: a function, its arguments behind kept and rows."""
    kept = case(B, 1)[0]
    lowered: dict[Any, Callable[[], Any]] = {
        name: functools.partial(layers(run, B).lower, kept, *arguments) for name, (run, *arguments) in runs.items()
    }
    results, held = {}, {"kept": kept}
    for name, compiled in timing.compile_all(lowered).items():
        if isinstance(compiled, str):
            print(f"{name}: {compiled.splitlines()[0]}", flush=True)
            continue
        arguments = runs[name][1:]

        def again(compiled: Any = compiled, arguments: Any = arguments) -> Any:
            outputs, held["kept"] = compiled(held["kept"], *arguments)
            return outputs, held["kept"]

        results[name] = timing.seconds(again, (), LAYERS, budget=0.05) * 1e6
    return results


def product_times(tokens: int) -> tuple[float, float]:
    """Microseconds of the products of a layer beside the recurrence, in and out, and of its MLP."""

    def seconds(*shapes: tuple[int, int]) -> float:
        """Products one behind the other, [O, D] each, on random rows."""
        names = range(len(shapes))
        xs = [jax.random.normal(jax.random.key(i), (tokens, shapes[i][1]), jnp.bfloat16) for i in names]
        ws = [jax.random.normal(jax.random.key(i), shapes[i], jnp.bfloat16) for i in names]
        program = jax.jit(lambda xs, ws: [x @ w.T for x, w in zip(xs, ws, strict=True)])
        return timing.seconds(program, (xs, ws), 1, budget=0.05) * 1e6

    values = HV * SIZE
    return seconds((HK * CHANNELS + values, WIDTH), (WIDTH, values)), seconds((2 * HIDDEN, WIDTH), (WIDTH, HIDDEN))


def sweep(args: argparse.Namespace, form: Any) -> Config:
    """Time each cut of the kernels by themselves on one sequence, and return the fastest."""
    _, weights, block = case(1, args.sweep)
    kept = case(1, 1)[0]
    cuts = itertools.product(args.columns, args.warps, args.stages)
    firsts = [Config(form, chunk_warps=c, solved=s) for c in args.chunk_warps for s in args.solved]
    lasts = [Config(form, columns=c, num_warps=w, num_stages=s) for c, w, s in cuts]
    make = jax.jit(functools.partial(prepare_chunks, config=Config(form), interpret=False))
    chunks = make(kept, weights, jnp.zeros(1, jnp.int32), jnp.array([True]), block)
    runs = {("chunks", c): (only_chunks(c), weights, block) for c in firsts}
    runs |= {("carry", c): (only_carry(c), chunks, block) for c in lasts}
    results = times(runs, 1)
    for (part, config), us in results.items():
        print(f"{part} of {args.sweep}: {_label(config)}: {us:.1f} us", flush=True)
    first, last = (min((us, c) for (part, c), us in results.items() if part == name)[1] for name in ("chunks", "carry"))
    return last._replace(chunk_warps=first.chunk_warps, solved=first.solved)


def _label(c: Config) -> str:
    return f"{c.form} {c.columns}x{c.num_warps}x{c.num_stages} chunks {c.chunk_warps}x{c.solved}"


def measure(configs: Sequence[Config], B: int, T: int) -> list[dict[str, Any]]:
    """Rows of one size: each configuration, and for short prompts plain JAX, beside the products."""
    kept, weights, block = case(B, T)
    runs: dict[Any, Any] = {}
    for config in configs:
        runs[_label(config)] = (whole(config), weights, block)
        runs["chunks", config] = (only_chunks(config), weights, block)
    if T <= 1024:
        runs["reference"] = (whole(None), weights, block)
    results, (products, mlp) = times(runs, B), product_times(B * T)
    table = []
    named: dict[str, Config | None] = {**{_label(c): c for c in configs}, "reference": None}
    for name, cut in named.items():
        if name not in results:
            continue
        us, held = results[name], () if cut is None else shapes_of(kept, weights, B, T, cut.form)
        table.append(
            {
                "tokens": f"{B}x{T}",
                "implementation": name,
                "us": round(us, 1),
                "first two us": None if cut is None else round(results["chunks", cut], 1),
                "products us": round(products, 1),
                "of products": round(us / products, 2),
                "MLP us": round(mlp, 1),
                "of all": round(us / (products + mlp), 2),
                "workspace MiB": round(sum(x.size * x.dtype.itemsize for x in held) / 2**20),
            }
        )
        print(" ".join(f"{x}" for x in table[-1].values()), flush=True)
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench --prefill", description=__doc__)
    parser.add_argument("--forms", nargs="+", default=list(FORMS[:3]), choices=FORMS)
    parser.add_argument("--columns", nargs="+", type=int, default=[16, 32, 64], help="of the state, a program")
    parser.add_argument("--warps", nargs="+", type=int, default=[4, 8], help="of a program of the third kernel")
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2], help="of the third kernel")
    parser.add_argument("--chunk-warps", nargs="+", type=int, default=[4, 8], help="of a program of the second kernel")
    parser.add_argument("--solved", nargs="+", type=int, default=[8, 16], help="rows eliminated one by one")
    parser.add_argument("--sweep", type=int, default=8192, help="tokens on which cuts are compared; 0 takes defaults")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--json", default="gated_delta_prefill.json", help="where the rows go")
    args = parser.parse_args(arguments)
    for form, rates in itertools.product(
        [] if args.no_check else dict.fromkeys([*args.forms, FORMS[-1]]), ((-2, 2), (-9, -4))
    ):
        print(check(Config(form), rates), flush=True)
    configs = [Config(form) for form in args.forms]
    if args.sweep:
        configs = list(dict.fromkeys([*configs, *(sweep(args, form) for form in args.forms)]))
    table = [row for size in SIZES for row in measure(configs, *size)]
    timing.save(args.json, table)
    print(timing.table(table))
