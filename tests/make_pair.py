"""Make the tests' own pair: a target that recites the Apache-2.0 licence, and its DFlash drafter.

    python -m tests.make_pair

needs the extra `train`; it writes `tests/pair/`, and README.md there says how long it took, with which
versions and seed. The target overfits on purpose: it recites the licence from its title on, and from nearly any of its
lines; a prompt of few words, or one that ends inside a word, may lead it to another passage. After the end of the
licence comes the end-of-text token and, if that is ignored, the licence again.

The drafter is trained as in arXiv 2602.06036 (section 4.2): target frozen, its embedding and head shared, random
anchors in the response, slot 0 the anchor and the others MASK, context strictly below the anchor, cross-entropy of
slot k weighted by exp(-(k - 1) / 7). Both are rounded to bfloat16, the target before the drafter is trained on it.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from jaxtyping import Array, Float, Int
from safetensors.flax import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from dflash_jax import LLM, SamplingParams
from dflash_jax.models.drafters.dflash import DraftModel
from dflash_jax.models.target import TargetModel
from dflash_jax.spec import DecoderConfig, DraftConfig, TargetConfig, draft_config, target_config
from dflash_jax.weights.loader import Params
from dflash_jax.weights.parameters import checkpoint_tensors
from tests.dense_kv import DenseKVCache

ROOT = Path(__file__).resolve().parents[1]
EOS, MASK = "<|endoftext|>", "<|mask|>"
VOCAB_SIZE = 1024
BLOCKS = 128  # trained in one step, spread over the rows
DECAY = 7.0  # of the weights of a block's slots
SHORT, MEDIUM, LONG = (32, 64), (8, 256), (1, 1536)  # rows and tokens of a batch; short rows teach how to begin
TARGET_BATCHES = (SHORT, SHORT, SHORT, MEDIUM)  # its layers reach 4 x 31 tokens back: longer rows have nothing to teach
DRAFT_BATCHES = (SHORT, SHORT, MEDIUM) * 3 + (LONG,)  # its full layer must learn long contexts

DECODER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "dtype": "float32",  # to compute in; the file holds bfloat16, which float32 represents exactly
}
TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 4,  # so that it recites as well at position 4000 as at 40
    "use_sliding_window": True,
    "sliding_window": 32,
    "max_window_layers": 0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    **DECODER,
}
DRAFT = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 32,
    "block_size": 16,
    "num_target_layers": 4,
    "dflash_config": {"target_layer_ids": [1, 2], "mask_token_id": 1},
    **DECODER,
}
GENERATION = {"do_sample": False, "temperature": 0.0, "eos_token_id": 0}
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": EOS,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 4096,
    "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
}


def train_tokenizer(text: str) -> tokenizers.Tokenizer:
    """Byte-level BPE of the text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[EOS, MASK],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return tokenizer


class Recitations:
    """Training rows: a prompt, then the licence as it goes on from there."""

    def __init__(self, text: str, tokenizer: tokenizers.Tokenizer, seed: int):
        self.text, self.tokenizer = text, tokenizer
        self.words = list(re.finditer(r"\S+", text))
        self.rng = np.random.default_rng(seed)

    def batch(self, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [rows, length] and the lengths of the prompts in them."""
        pairs = [self._row(length) for _ in range(rows)]
        return np.array([ids for ids, _ in pairs], np.int32), np.array([prompt for _, prompt in pairs], np.int32)

    def _row(self, length: int) -> tuple[list[int], int]:
        """Prompt and continuation are tokenized apart, so that prompts may also end inside a word."""
        start = 0
        if self.rng.random() < 0.2:  # an unknown prompt
            prompt = self.rng.integers(2, VOCAB_SIZE, self.rng.integers(1, 33)).tolist()
        else:
            first = int(self.rng.integers(len(self.words) - 2))
            last = min(first + int(self.rng.integers(1, 12)), len(self.words) - 1)
            begin, start = self.words[first].start(), self.words[last].end()
            if self.rng.random() < 0.5:
                begin = self.text.rfind("\n", 0, begin) + 1
            ends = self.rng.random()
            if ends < 0.2:  # inside a word or a space
                start += int(self.rng.integers(-4, 4))
            elif ends < 0.4:  # with its line
                start = self.text.index("\n", start) + 1
            prompt = self._encode(self.text[begin:start])
        rest = self.text[start:] + EOS + self.text + EOS + self.text
        ids = prompt + self._encode(rest[: 8 * length])  # a token holds 4 characters on average
        return ids[:length], len(prompt)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids


def empty_cache(config: DecoderConfig, rows: int, length: int) -> DenseKVCache:
    shape = (rows, length, config.num_key_value_heads, config.head_dim)
    return DenseKVCache.zeros(config.num_hidden_layers, shape, jnp.float32)


def run_target(
    config: TargetConfig, params: Params, tokens: Int[Array, "B T"], taps: tuple[int, ...] = ()
) -> tuple[Float[Array, "B T D"], Float[Array, "B T C"]]:
    """Final hidden states and taps of whole rows."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cache = empty_cache(config, *tokens.shape)
    hidden, features, _ = TargetModel(config).bind({"params": params})(tokens, positions, cache, taps)
    return hidden, features


def target_loss(
    params: Params, tokens: Int[Array, "B T"], prompts: Int[Array, " B"], config: TargetConfig
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean cross-entropy of the continuations, and the share of their tokens that is predicted right."""
    hidden, _ = run_target(config, params, tokens)
    logits = TargetModel(config).bind({"params": params}).logits(hidden[:, :-1])
    labels = tokens[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    weights = jnp.arange(1, tokens.shape[1]) >= prompts[:, None]
    right = logits.argmax(axis=-1) == labels
    return (losses * weights).sum() / weights.sum(), (right & weights).sum() / weights.sum()


def draft_loss(
    params: Params,
    tokens: Int[Array, "B T"],
    anchors: Int[Array, "B A"],
    target_params: Params,
    target: TargetConfig,
    draft: DraftConfig,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Weighted cross-entropy of the blocks at the anchors, and their mean acceptance length.

    The context of a whole row is written once and copied for each of its anchors. As in serving, a block
    overwrites the context from its anchor on, and nothing beyond the block is seen.
    """
    model, frozen = DraftModel(draft).bind({"params": params}), TargetModel(target).bind({"params": target_params})
    _, features = run_target(target, target_params, tokens, draft.target_layer_ids)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cache = model.write_context(features, positions, empty_cache(draft, *tokens.shape))
    cache = jax.tree.map(lambda array: jnp.repeat(array, anchors.shape[1], axis=0), cache)
    slots = jnp.arange(draft.block_size)
    block_positions = anchors.reshape(-1, 1) + slots
    labels = jnp.take_along_axis(jnp.repeat(tokens, anchors.shape[1], axis=0), block_positions, axis=1)
    block = frozen.embed(jnp.where(slots == 0, labels, draft.mask_token_id))
    hidden, _ = model(block, block_positions, cache)
    logits, labels = frozen.logits(hidden[:, 1:]), labels[:, 1:]
    weights = jnp.exp(-(slots[1:] - 1) / DECAY)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels) @ weights / weights.sum()
    accepted = jnp.cumprod(logits.argmax(axis=-1) == labels, axis=1).sum(axis=1)
    return losses.mean(), 1.0 + accepted.mean()


def train(
    name: str,
    params: Params,
    loss: Callable[..., tuple[Array, Array]],
    batch: Callable[[int], tuple[Any, ...]],
    steps: int,
    learning_rate: float,
) -> Params:
    """AdamW with warm-up and cosine decay; prints the loss and the metric that `loss` gives beside it."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, max(1, steps // 25), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Params, state: Any, *inputs: Array) -> tuple[Params, Any, Array, Array]:
        (value, metric), gradients = jax.value_and_grad(loss, has_aux=True)(params, *inputs)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value, metric

    state, began = optimizer.init(params), time.perf_counter()
    for step in range(steps):
        params, state, value, metric = update(params, state, *batch(step))
        if step % 50 == 0 or step == steps - 1:
            seconds = time.perf_counter() - began
            print(f"{name} step {step}: loss {value:.4f}, metric {metric:.4f}, {seconds:.0f} s", flush=True)
    return params


def round_to_bfloat16(params: Params) -> Params:
    return jax.tree.map(lambda array: array.astype(jnp.bfloat16).astype(jnp.float32), params)


def save_model(folder: Path, raw: dict[str, Any], config: TargetConfig | DraftConfig, params: Params) -> None:
    """Write config.json and the weights under the checkpoint's names."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", raw)
    tensors = {name: tensor.astype(jnp.bfloat16) for name, tensor in checkpoint_tensors(config, params).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def recite(out: Path, text: str) -> str:
    """Recite the whole licence from its title with the pair as it was written; says how that went."""
    title = re.match(r"\s*(\S.*\n.*)\n", text)
    assert title is not None
    prompt = title[1]
    params = SamplingParams(temperature=0.0, max_tokens=4000)
    (result,) = LLM(out / "target", out / "draft", max_num_seqs=1).generate(prompt, params)
    written, text = prompt + result.outputs[0].text, text[title.start(1) :]
    if written != text:
        both = enumerate(zip(written, text, strict=False))
        right = next((i for i, (mine, true) in both if mine != true), len(written))
        raise SystemExit(f"the pair recites {right} characters, then goes astray: {written[right:][:200]!r}")
    count, accepted = len(result.outputs[0].token_ids), result.metrics.mean_acceptance_length
    return f"The whole licence, {count} tokens from its title on: mean acceptance length {accepted:.2f}."


def write_readme(out: Path, seed: int, seconds: float, report: str) -> None:
    """Say what the pair is and how it was made."""
    versions = [f"{name} {version(name)}" for name in ("jax", "flax", "optax", "tokenizers")]
    (out / "README.md").write_text(
        f"""# The tests' pair

No language model, but a pair whose words and acceptance tests know. `target/` (Qwen3, {VOCAB_SIZE} tokens) was
overfitted on the text of the Apache-2.0 licence and recites it from its title on, and from nearly any of its lines; to
other prompts it answers with pieces of the licence. `draft/` is a DFlash drafter trained on that recitation.
Its acceptance lengths show that the machinery works, and nothing of what a drafter reaches on real text.

Made by `python -m tests.make_pair --seed {seed}` in {seconds:.0f} s on a CPU
(Python {platform.python_version()}, {", ".join(versions)}).
{report}
Weights are stored in bfloat16; `config.json` says float32, which is what they are computed in.
""",
        encoding="utf-8",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=ROOT / "LICENSE", help="what the target learns by heart")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "pair")
    parser.add_argument("--target-steps", type=int, default=1600)
    parser.add_argument("--draft-steps", type=int, default=1600)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    began = time.perf_counter()
    text = args.text.read_text(encoding="utf-8")
    tokenizer = train_tokenizer(text)
    recitations = Recitations(text, tokenizer, args.seed)
    target, draft = target_config(TARGET), draft_config(DRAFT)
    zeros = jnp.zeros((1, draft.block_size), jnp.int32)
    keys = jax.random.split(jax.random.key(args.seed))
    target_params = TargetModel(target).init(keys[0], zeros, zeros, empty_cache(target, *zeros.shape))["params"]
    block = jnp.zeros((*zeros.shape, draft.hidden_size))
    draft_params = DraftModel(draft).init(keys[1], block, zeros, empty_cache(draft, *zeros.shape))["params"]

    def target_batch(step: int) -> tuple[np.ndarray, np.ndarray]:
        return recitations.batch(*TARGET_BATCHES[step % len(TARGET_BATCHES)])

    def draft_batch(step: int) -> tuple[np.ndarray, np.ndarray, Params]:
        rows, length = DRAFT_BATCHES[step % len(DRAFT_BATCHES)]
        tokens, prompts = recitations.batch(rows, length)
        shape = (rows, BLOCKS // rows)
        last = length - draft.block_size
        anchors = recitations.rng.integers(np.minimum(prompts, last)[:, None], last + 1, shape, dtype=np.int32)
        return tokens, anchors, target_params

    target_params = train(
        "target",
        target_params,
        partial(target_loss, config=target),
        target_batch,
        args.target_steps,
        args.learning_rate,
    )
    target_params = round_to_bfloat16(target_params)
    save_model(args.out / "target", TARGET, target, target_params)
    tokenizer.save(str(args.out / "target" / "tokenizer.json"))
    write_json(args.out / "target" / "tokenizer_config.json", TOKENIZER)
    write_json(args.out / "target" / "generation_config.json", GENERATION)
    draft_params = train(
        "draft",
        draft_params,
        partial(draft_loss, target=target, draft=draft),
        draft_batch,
        args.draft_steps,
        args.learning_rate,
    )
    save_model(args.out / "draft", DRAFT, draft, draft_params)
    report = recite(args.out, text)
    print(report)
    write_readme(args.out, args.seed, time.perf_counter() - began, report)


if __name__ == "__main__":
    main()
