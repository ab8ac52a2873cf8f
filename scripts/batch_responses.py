"""Have a small target complete thousands of prompts side by side on one GPU, as training data of its drafter.

    python scripts/batch_responses.py prompts --corpus build/corpus --tokenizer build/hybrid/target --out prompts.npz
    python scripts/batch_responses.py responses --target build/hybrid/target --prompts prompts.npz --out responses.jsonl

`prompts` cuts token ids out of training files, from the begin of a file or line. `responses` completes them greedily
and writes {"prompt_token_ids": ids, "token_ids": ids} a line.

`python -m dflash_jax.train.data` serves any model and any prompt with the engine; with two million parameters, most of
its time is the host's. Here one program runs 4,096 sequences from their first token to their last. All are at the same
position: a step takes the prompt's token where there is one, else the likeliest.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer

from dflash_jax.models.caches import KVCache
from dflash_jax.models.target import TargetModel
from dflash_jax.spec import GatedDelta, LayerMask, TargetConfig, read_json, target_config
from dflash_jax.state.dense_kv import attention
from dflash_jax.weights.loader import Params, load_params
from pallas_kernels.gated_delta import Weights, reference
from pallas_kernels.lib.rotary import Rotary, split_heads

EOS = 0
LENGTHS = (24, 320)  # tokens of a prompt: limits
WHOLE_FILES = 0.2  # share of prompts that begin where their file begins


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LockstepCache(KVCache):
    """A `RecurrentCache` of sequences that are all at the same position; a call runs one token of each.

    Attributes:
        keys: [B, S, K, H] of each layer with attention, position p in slot p.
        values: likewise.
        states: [B, HV, dk, dv] of each recurrent layer, float32.
        windows: [B, J, HK, c] of the same layers, the last inputs of the convolution.
    """

    keys: dict[int, Array]
    values: dict[int, Array]
    states: dict[int, Array]
    windows: dict[int, Array]

    @staticmethod
    def zeros(config: TargetConfig, B: int, S: int, dtype: jnp.dtype) -> LockstepCache:
        """The cache before the first token."""
        pools: tuple[dict[int, Array], ...] = ({}, {}, {}, {})
        for i, layer in enumerate(config.layers):
            delta = layer.mixer
            if isinstance(delta, GatedDelta):
                pools[2][i] = jnp.zeros((B, delta.value_heads, delta.key_dim, delta.value_dim))
                pools[3][i] = jnp.zeros((B, delta.conv_width - 1, delta.key_heads, delta.channels_per_key), dtype)
            else:
                for pool in pools[:2]:
                    pool[i] = jnp.zeros((B, S, config.num_key_value_heads, config.head_dim), dtype)
        return LockstepCache(*pools)

    def write(
        self, layer: int, heads: Float[Array, "B 1 K J H"], rotary: Rotary, positions: Int[Array, "B 1"]
    ) -> tuple[Float[Array, "B 1 N H"], LockstepCache]:
        """Keep the keys and values of the token; returns its queries and the cache."""
        q, *both = split_heads(heads, rotary)
        keys, values = (
            {**pool, layer: jax.lax.dynamic_update_slice_in_dim(pool[layer], new, positions[0, 0], axis=1)}
            for pool, new in zip((self.keys, self.values), both, strict=True)
        )
        return q, replace(self, keys=keys, values=values)

    def attend(
        self,
        layer: int,
        q: Float[Array, "B 1 N H"],
        positions: Int[Array, "B 1"],
        kv_length: Int[Array, " B"],
        mask: LayerMask,
    ) -> Float[Array, "B 1 N H"]:
        """Attend over every position up to the token's."""
        seen = jnp.arange(self.keys[layer].shape[1]) <= positions[0, 0]
        return attention(q, self.keys[layer], self.values[layer], seen[None, None])

    def advance(
        self,
        layer: int,
        inputs: Float[Array, "B 1 HK _"],
        gates: Float[Array, "B 1 HV 2"],
        weights: Weights,
        positions: Int[Array, "B 1"],
        delta: GatedDelta,
    ) -> tuple[Float[Array, "B 1 HV dv"], LockstepCache]:
        """Run the token through convolution and recurrence."""
        window = jnp.concatenate([self.windows[layer], inputs[..., : delta.channels_per_key]], axis=1)
        rows = reference.split_heads(reference.convolve(window, weights.conv), delta.key_dim, delta.value_dim)
        decay, strength = reference.decay_and_strength(gates, weights, jnp.ones((1, 1, 1), bool))
        out, state = reference.advance(self.states[layer], *rows, decay, strength)
        states, windows = {**self.states, layer: state}, {**self.windows, layer: window[:, 1:]}
        return out.astype(inputs.dtype), replace(self, states=states, windows=windows)


@partial(jax.jit, static_argnames=("config", "length"))
def complete(
    params: Params, prompts: Int[Array, "B P"], lengths: Int[Array, " B"], *, config: TargetConfig, length: int
) -> Int[Array, "B S"]:
    """Go on with prompts, greedily.

    Args:
        params: of the target.
        prompts: token ids, with anything behind the prompts.
        lengths: tokens of each prompt.
        config: of the target.
        length: S, tokens of prompts and responses; what follows an end-of-text token means nothing.
    """
    B, P = prompts.shape
    model = TargetModel(config).bind({"params": params})

    def step(carry: tuple[Array, LockstepCache], t: Array) -> tuple[tuple[Array, LockstepCache], Array]:
        token, cache = carry
        hidden, _, after = model(token[:, None], jnp.full((B, 1), t), cache)
        assert isinstance(after, LockstepCache)
        likeliest = jnp.argmax(model.logits(hidden)[:, 0], axis=-1)
        known = jax.lax.dynamic_index_in_dim(prompts, jnp.minimum(t + 1, P - 1), axis=1, keepdims=False)
        return (jnp.where(t + 1 < lengths, known, likeliest.astype(jnp.int32)), after), token

    cache = LockstepCache.zeros(config, B, length, params["embed_tokens"].dtype)
    _, tokens = jax.lax.scan(step, (prompts[:, 0], cache), jnp.arange(length))
    return tokens.T


def cut_prompts(tokens: np.ndarray, is_newline: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts uint16 [count, P] and their lengths, each from one file.

    Args:
        tokens: of all files, each with an end-of-text token behind it.
        is_newline: whether each token of the vocabulary ends a line.
        count: of prompts.
        seed: decides which.
    """
    rng, longest = np.random.default_rng(seed), LENGTHS[1]
    ends = np.flatnonzero(tokens[:-longest] == EOS) + 1
    lines = np.flatnonzero(is_newline[tokens[:-longest]]) + 1
    prompts, lengths = np.zeros((count, longest), np.uint16), np.zeros(count, np.uint16)
    made = 0
    while made < count:
        start = int(rng.choice(ends if rng.random() < WHOLE_FILES else lines))
        length = int(np.exp(rng.uniform(*np.log(LENGTHS))))
        piece = tokens[start : start + length]
        if not (piece == EOS).any():
            prompts[made, :length], lengths[made] = piece, length
            made += 1
    return prompts, lengths


def run_prompts(args: argparse.Namespace) -> None:
    """Cut prompts out of the tokens of the corpus, which train_embedded.py writes."""
    vocabulary = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json")).get_vocab()
    is_newline = np.zeros(max(vocabulary.values()) + 1, bool)
    is_newline[[number for token, number in vocabulary.items() if token.endswith("Ċ")]] = True
    prompts, lengths = cut_prompts(np.load(args.corpus / "train.npy"), is_newline, args.count, args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.out, prompts=prompts, lengths=lengths)
    print(f"{len(prompts)} prompts of {lengths.mean():.0f} tokens in {args.out}")


def run_responses(args: argparse.Namespace) -> None:
    """Complete prompts greedily."""
    config = target_config(read_json(args.target / "config.json"))
    params = load_params(args.target, config, jnp.bfloat16, keep_quantized=False)
    loaded = np.load(args.prompts)
    prompts, lengths = (loaded[name].astype(np.int32)[: args.count] for name in ("prompts", "lengths"))
    began, written = time.perf_counter(), 0
    with args.out.open("w", encoding="utf-8") as lines:
        for first in range(0, len(prompts) - args.rows + 1, args.rows):
            part = slice(first, first + args.rows)
            completed = np.asarray(complete(params, prompts[part], lengths[part], config=config, length=args.length))
            for row, length in zip(completed, lengths[part], strict=True):
                ends = np.flatnonzero(row[length:] == EOS)
                response = row[length : length + ends[0] + 1] if len(ends) else row[length:]
                sample = {"prompt_token_ids": row[:length].tolist(), "token_ids": response.tolist()}
                lines.write(json.dumps(sample, separators=(",", ":")) + "\n")
                written += len(response)
            seconds = time.perf_counter() - began
            print(f"{first + args.rows} responses, {written:,} tokens, {seconds:.0f} s", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    subparsers = parser.add_subparsers(required=True)
    for name, run in (("prompts", run_prompts), ("responses", run_responses)):
        command = subparsers.add_parser(name, help=run.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.set_defaults(run=run)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--count", type=int, default=40_960, help="of prompts")
        if run is run_prompts:
            command.add_argument("--corpus", type=Path, default=Path("build/corpus"))
            command.add_argument("--tokenizer", type=Path, default=Path("build/hybrid/target"), help="a folder")
            command.add_argument("--seed", type=int, default=0)
        else:
            command.add_argument("--target", type=Path, default=Path("build/hybrid/target"))
            command.add_argument("--prompts", type=Path, required=True)
            command.add_argument("--rows", type=int, default=4096, help="sequences side by side")
            command.add_argument("--length", type=int, default=640, help="tokens of prompt and response")
    args = parser.parse_args(arguments)
    args.run(args)


if __name__ == "__main__":
    main()
