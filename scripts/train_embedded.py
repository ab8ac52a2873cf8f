"""Train the target of the embedded pair from scratch, on the corpus of `python_corpus.py`.

    python scripts/train_embedded.py tokenizer --corpus build/corpus --out build/embedded/target
    python scripts/train_embedded.py target --corpus build/corpus --out build/embedded/target --minutes 8
    python scripts/train_embedded.py target --corpus build/corpus --out build/embedded/target --minutes 8 --grow
    python scripts/train_embedded.py target --architecture hybrid --corpus build/corpus --out build/hybrid/target

The first command writes the tokenizer. The second encodes the corpus with it (once: `train.npy` and `heldout.npy` stay
in the folder of the corpus), trains on all devices and writes the model to the same folder, which `LLM` can load. The
third continues with that model and twice its layers: each layer is followed by a new one, which adds nothing at first.
The fourth trains a hybrid of Gated DeltaNet and attention, with the tokenizer that its folder holds.

The tokenizer is a byte-level BPE that knows Python's layout: an indentation is one token, apart from the newlines
before it, so that a prompt may end in a newline and the model still indents the next line.

Files are joined by the end-of-text token; each step takes rows from random places of the corpus. Some rows repeat their
first tokens until their end, so that a small model learns to copy from far back. Weights are float32,
computed with in bfloat16, projections as fp8 will hold them in the file; AdamW, with a warm-up and a cosine to zero
over the given time.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from embedded_architectures import ARCHITECTURES, MAX_LENGTH, VOCAB_SIZE
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dflash_jax.models.caches import KVCache
from dflash_jax.models.target import TargetModel
from dflash_jax.spec import TargetConfig, read_json, target_config
from dflash_jax.train.cache import SequenceCache
from dflash_jax.weights.export import save_json, save_model
from dflash_jax.weights.formats.fp8 import to_e4m3
from dflash_jax.weights.formats.weight import logits_of
from dflash_jax.weights.loader import Params, load_params
from dflash_jax.weights.parameters import Parameter, build, output_axes, parameters_of
from dflash_jax.weights.tables import checkpoint_table

EOS, MASK = "<|endoftext|>", "<|mask|>"
# Pieces: newlines, indentation, names with the space and underscores before them, digits, punctuation, other spaces.
PIECES = r"\n+|^[ \t]+| ?_*\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]+"
SAMPLE = 20_000_000  # characters that the tokenizer is trained on
GENERATION = {"do_sample": False, "temperature": 0.0, "eos_token_id": 0}
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": EOS,
    "clean_up_tokenization_spaces": False,
    "model_max_length": MAX_LENGTH,
    "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
}
REPEATS = 1 / 16  # share of rows that repeat their first tokens
SHORTEST_REPEAT = 64  # tokens
WARM_UP = 0.02  # share of the training
CHUNK = 10  # steps of one program, with one learning rate
EVALUATED = 0.05  # share of the training between two evaluations on held-out files


def read_texts(path: Path) -> list[str]:
    """The files of `train.jsonl.xz` or `heldout.jsonl.xz`."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def sample(texts: list[str], size: int, seed: int) -> Iterator[str]:
    """Files in random order, until they have `size` characters in total."""
    for index in np.random.default_rng(seed).permutation(len(texts)):
        if size <= 0:
            return
        size -= len(texts[index])
        yield texts[index]


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on texts; it is lossless, and special tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(texts: list[str], tokenizer: Tokenizer, files: int = 256) -> np.ndarray:
    """Token ids of all texts, each followed by the end-of-text token: uint16 [tokens].

    Args:
        texts: to encode.
        tokenizer: of `train_tokenizer`.
        files: texts encoded at a time.
    """
    end = tokenizer.token_to_id(EOS)
    ids: list[np.ndarray] = []
    for first in range(0, len(texts), files):
        encodings = tokenizer.encode_batch_fast(texts[first : first + files], add_special_tokens=False)
        ids += [np.array([*encoding.ids, end], np.uint16) for encoding in encodings]
    return np.concatenate(ids)


def tokens_of(corpus: Path, split: str, tokenizer: Tokenizer) -> np.ndarray:
    """Tokens of a split, uint16 [tokens]; encoded if no file holds them."""
    path = corpus / f"{split}.npy"
    if not path.exists():
        np.save(path, encode(read_texts(corpus / f"{split}.jsonl.xz"), tokenizer))
    return np.load(path)


class TrainedTarget(TargetModel):
    """A target that computes in bfloat16 and keeps its embedding in float32.

    The gradient of an embedding sums the rows of all equal tokens, thousands in a batch: too many for bfloat16.
    """

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Token embeddings in bfloat16."""
        return super().embed(tokens).astype(jnp.bfloat16)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """float32 logits of a product in bfloat16."""
        return logits_of(hidden, self.head.astype(hidden.dtype))


def as_stored(params: Params, config: TargetConfig) -> Params:
    """Weights to compute with: projections rounded as in the file, with gradients as if they were not."""

    def stored(parameter: Parameter) -> Array:
        weight = parameter.of(params)
        if parameter.is_float32:
            return weight
        if parameter.is_rounded:
            values, scales = to_e4m3(weight, output_axes(parameter.axes))
            shape = scales.shape + (1,) * (weight.ndim - scales.ndim)
            rounded = values.astype(jnp.float32) * scales.reshape(shape)
            weight = jax.lax.stop_gradient(rounded) + (weight - jax.lax.stop_gradient(weight))
        return weight if parameter.path == ("embed_tokens",) else weight.astype(jnp.bfloat16)

    return build(parameters_of(checkpoint_table(config), config), stored)


def grown(params: Params, fresh: Params) -> Params:
    """Parameters of twice the layers that compute the same function.

    Each layer of `params` is followed by one of `fresh`, whose projections to the residual stream are set to zero.
    """
    grown_params = dict(fresh) | {name: value for name, value in params.items() if not name.startswith("layers_")}
    for index in range(sum(name.startswith("layers_") for name in params)):
        grown_params[f"layers_{2 * index}"] = params[f"layers_{index}"]
        after = grown_params[f"layers_{2 * index + 1}"]
        for block, name in (("self_attn", "o_proj"), ("mlp", "down_proj")):
            after[block][name] = jnp.zeros_like(after[block][name])
    return grown_params


def loss_of(params: Params, tokens: Int[Array, "B T1"], config: TargetConfig) -> Float[Array, ""]:
    """Mean cross-entropy of every token but the first, in nats."""
    model = TrainedTarget(config).bind({"params": as_stored(params, config)})
    inputs = tokens[:, :-1]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
    cache: KVCache = SequenceCache()
    hidden, _, _ = model(inputs, positions, cache)
    return optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), tokens[:, 1:]).mean()


def rows_at(
    tokens: Int[Array, " S"], starts: Int[Array, " B"], length: int, periods: Int[Array, " B"] | None = None
) -> Int[Array, "B T1"]:
    """Rows of `length` tokens, and the token after each; a row of period n repeats its first n tokens."""
    offsets = jnp.arange(length + 1)
    if periods is not None:
        offsets = offsets % periods[:, None]
    return tokens[starts[:, None] + offsets].astype(jnp.int32)


def random_periods(key: Array, rows: int, length: int) -> Int[Array, " B"]:
    """Periods of rows: at most half their length for `REPEATS` of them, longer than the row for the others."""
    chosen, drawn = jax.random.split(key)
    shortest = min(SHORTEST_REPEAT, length // 4)
    periods = jax.random.randint(drawn, (rows,), shortest, length // 2 + 1)
    return jnp.where(jax.random.bernoulli(chosen, REPEATS, (rows,)), periods, length + 1)


def make_optimizer(weight_decay: float) -> optax.GradientTransformation:
    """AdamW for a learning rate of 1; matrices decay, norms do not."""

    def is_matrix(params: Params) -> Any:
        return jax.tree.map(lambda array: array.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(weight_decay, mask=is_matrix),
    )


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up, then a cosine to zero; progress goes from 0 to 1."""
    if progress < WARM_UP:
        return peak * progress / WARM_UP
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARM_UP) / (1 - WARM_UP))))


def make_chunk(
    config: TargetConfig, optimizer: optax.GradientTransformation, rows: int, length: int, mesh: Mesh
) -> jax.stages.Wrapped:
    """`CHUNK` steps as one program: (params, state, key, rate, tokens) -> (params, state, mean loss).

    The rows of a step are split over the devices; everything else is replicated.
    """

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("dp"), P("dp"), P()), out_specs=P(), check_vma=False)
    def loss_and_gradients(params: Params, starts: Array, periods: Array, tokens: Array) -> tuple[Array, Params]:
        loss_and_gradient = jax.value_and_grad(loss_of)(params, rows_at(tokens, starts, length, periods), config)
        return jax.lax.pmean(loss_and_gradient, "dp")

    @partial(jax.jit, donate_argnums=(0, 1))
    def chunk(params: Params, state: Any, key: Array, rate: Array, tokens: Array) -> tuple[Params, Any, Array]:
        def step(carry: tuple[Params, Any], key: Array) -> tuple[tuple[Params, Any], Array]:
            params, state = carry
            of_starts, of_periods = jax.random.split(key)
            starts = jax.random.randint(of_starts, (rows,), 0, tokens.shape[0] - length)
            periods = random_periods(of_periods, rows, length)
            loss, gradients = loss_and_gradients(params, starts, periods, tokens)
            updates, state = optimizer.update(gradients, state, params)
            return (jax.tree.map(lambda p, u: p - rate * u, params, updates), state), loss

        (params, state), losses = jax.lax.scan(step, (params, state), jax.random.split(key, CHUNK))
        return params, state, losses.mean()

    return chunk


def make_evaluation(config: TargetConfig, tokens: Array, rows: int, length: int) -> Callable[[Params], float]:
    """A function that computes the loss on rows which cover `tokens`, without an incomplete last batch."""
    batch_loss = jax.jit(lambda params, starts: loss_of(params, rows_at(tokens, starts, length), config))
    starts = np.arange(0, tokens.shape[0] - length, length)
    batches = starts[: max(1, len(starts) // rows) * rows].reshape(-1, min(rows, len(starts)))
    return lambda params: float(np.mean([batch_loss(params, batch) for batch in batches]))


def train(
    args: argparse.Namespace,
    config: TargetConfig,
    train_tokens: np.ndarray,
    heldout: np.ndarray,
    save: Callable[[Params], None],
) -> None:
    """Train until the steps or the minutes are over; prints losses and speed, and saves at every evaluation."""
    key, seed = jax.random.split(jax.random.key(args.seed))
    zeros = jnp.zeros((1, 2), jnp.int32)
    params = TargetModel(config).init(seed, zeros, zeros, SequenceCache())["params"]
    if args.grow:
        smaller = target_config(read_json(args.out / "config.json"))
        params = grown(load_params(args.out, smaller, jnp.float32, keep_quantized=False), params)
    optimizer = make_optimizer(args.weight_decay)
    mesh = jax.make_mesh((jax.device_count(),), ("dp",), axis_types=(AxisType.Auto,))
    replicated = NamedSharding(mesh, P())
    evaluate = make_evaluation(config, jnp.asarray(heldout), args.rows, args.length)
    params, state, tokens, key = jax.device_put((params, optimizer.init(params), train_tokens, key), replicated)
    program = make_chunk(config, optimizer, args.rows, args.length, mesh)
    chunk = program.lower(params, state, key, jnp.float32(0), tokens).compile()
    print(f"{sum(p.size for p in jax.tree.leaves(params)):,} parameters, {tokens.size:,} tokens", flush=True)
    print(f"held-out loss before training {evaluate(params):.4f}", flush=True)

    steps, seconds, looked = 0, 0.0, 0.0
    progress = 0.0
    while progress < 1:
        began = time.perf_counter()
        key, chunk_key = jax.random.split(key)
        rate = learning_rate(progress or WARM_UP / 2, args.learning_rate)  # at progress 0 the rate would be 0
        params, state, loss = chunk(params, state, chunk_key, jnp.float32(rate), tokens)
        loss = float(loss)
        steps, seconds = steps + CHUNK, seconds + time.perf_counter() - began
        progress = steps / args.steps if args.steps else seconds / (60 * args.minutes)
        if progress - looked >= EVALUATED or progress >= 1:
            looked = progress
            speed = steps * args.rows * args.length / seconds
            print(
                f"step {steps}, {progress:.0%}: loss {loss:.4f}, held-out {evaluate(params):.4f}, "
                f"rate {rate:.2e}, {speed:,.0f} tokens/s, {seconds:.0f} s",
                flush=True,
            )
            save(params)


def run_tokenizer(args: argparse.Namespace) -> None:
    """Train the tokenizer and write it."""
    texts = read_texts(args.corpus / "train.jsonl.xz")
    tokenizer = train_tokenizer(sample(texts, SAMPLE, args.seed), VOCAB_SIZE)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"))
    save_json(args.out / "tokenizer_config.json", TOKENIZER)
    for split in ("train", "heldout"):
        (args.corpus / f"{split}.npy").unlink(missing_ok=True)  # tokens of the old tokenizer
    heldout = read_texts(args.corpus / "heldout.jsonl.xz")
    characters = sum(map(len, heldout)) / len(encode(heldout, tokenizer))
    print(f"{tokenizer.get_vocab_size()} tokens; {characters:.2f} characters each on held-out files")


def run_target(args: argparse.Namespace) -> None:
    """Train the target and write it."""
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    layers = 2 * read_json(args.out / "config.json")["num_hidden_layers"] if args.grow else args.layers
    raw = {
        **ARCHITECTURES[args.architecture],
        "num_hidden_layers": layers,
        "vocab_size": tokenizer.get_vocab_size(),
    }
    config = target_config(raw)
    save_json(args.out / "generation_config.json", GENERATION)

    def save(params: Params) -> None:
        save_model(args.out, raw, config, jax.device_get(params), "fp8_e4m3")

    splits = (tokens_of(args.corpus, split, tokenizer) for split in ("train", "heldout"))
    train(args, config, *splits, save)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    subparsers = parser.add_subparsers(required=True)
    for name, run in (("tokenizer", run_tokenizer), ("target", run_target)):
        command = subparsers.add_parser(name, help=run.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.set_defaults(run=run)
        command.add_argument("--corpus", type=Path, default=Path("build/corpus"))
        command.add_argument("--out", type=Path, default=Path("build/embedded/target"))
        command.add_argument("--seed", type=int, default=0)
    command.add_argument("--minutes", type=float, default=8.0, help="how long to train, compilation aside")
    command.add_argument("--steps", type=int, default=0, help="train so many steps instead, however long it takes")
    command.add_argument("--rows", type=int, default=64, help="of a batch")
    command.add_argument("--length", type=int, default=MAX_LENGTH, help="tokens of a row")
    command.add_argument("--architecture", choices=tuple(ARCHITECTURES), default="dense", help="of a new model")
    command.add_argument("--layers", type=int, default=8)
    command.add_argument("--grow", action="store_true", help="go on with the model in the folder, in twice its layers")
    command.add_argument("--learning-rate", type=float, default=3e-3)
    command.add_argument("--weight-decay", type=float, default=0.1)
    args = parser.parse_args(arguments)
    if args.run is run_target and args.grow and args.architecture != "dense":
        parser.error("--grow knows the layers of dense models only; train a hybrid from the start.")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    args.run(args)


if __name__ == "__main__":
    main()
