"""The whole thing a second time, in plain float64 numpy and with nothing of `dflash_jax` in it.

No cache, no batch, no padding: the target is run again over all tokens for every block, and the drafter over all
context. Written from the paper (arXiv 2602.06036) and the published checkpoints' conventions.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


@dataclass
class Rope:
    """Angles of one position, and the factor on cosines and sines."""

    inverse: np.ndarray
    factor: float = 1.0

    def __call__(self, x, positions):
        """Rotate x [T, heads, H], pairing dimension i with i + H/2."""
        angles = np.asarray(positions)[:, None, None] * self.inverse
        cos, sin = np.cos(angles) * self.factor, np.sin(angles) * self.factor
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rope_of(config, head_dim):
    spec = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = spec.get("rope_theta") or config.get("rope_theta", 10_000.0)
    plain = np.array([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])
    kind = spec.get("rope_type") or spec.get("type") or "default"
    if kind == "default":
        return Rope(plain)
    factor = spec["factor"]
    if kind == "linear":
        return Rope(plain / factor)
    original = spec["original_max_position_embeddings"]
    if kind == "llama3":
        longest, shortest = original / spec["low_freq_factor"], original / spec["high_freq_factor"]

        def slowed(frequency):
            wavelength = 2 * np.pi / frequency
            if wavelength < shortest:
                return frequency
            if wavelength > longest:
                return frequency / factor
            smooth = (original / wavelength - spec["low_freq_factor"]) / (
                spec["high_freq_factor"] - spec["low_freq_factor"]
            )
            return (1 - smooth) * frequency / factor + smooth * frequency

        return Rope(np.array([slowed(frequency) for frequency in plain]))
    assert kind == "yarn"

    def dimension(turns):  # the pair that turns this often over the original length
        return head_dim / 2 * np.log(original / (2 * np.pi * turns)) / np.log(theta)

    first = max(np.floor(dimension(spec.get("beta_fast", 32))), 0)
    last = min(np.ceil(dimension(spec.get("beta_slow", 1))), head_dim - 1)
    slow = np.clip((np.arange(head_dim // 2) - first) / (last - first if last > first else 0.001), 0, 1)
    return Rope(plain * (1 - slow) + plain / factor * slow, spec.get("attention_factor", 0.1 * np.log(factor) + 1))


def norm(x, weight, eps):
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


class Weights:
    """The tensors of a folder in float64, and what its config.json says of every layer's shape."""

    def __init__(self, folder: Path, config: dict, prefix: str):
        files = sorted(folder.glob("*.safetensors"))
        self.tensors = {k: np.asarray(v, np.float64) for f in files for k, v in load_file(f).items()}
        self.config, self.prefix = config, prefix
        self.eps = config["rms_norm_eps"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads") or self.heads
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.layers = config["num_hidden_layers"]
        self.rope = rope_of(config, self.head_dim)

    def __getitem__(self, name):
        return self.tensors[self.prefix + name]

    def linear(self, name, x):
        y = x @ self[f"{name}.weight"].T
        bias = self.tensors.get(f"{self.prefix}{name}.bias")
        return y if bias is None else y + bias

    def project(self, layer, name, x, positions):
        """Queries, keys or values [T, heads, H]: queries and keys normed (where there is a norm) and rotated."""
        y = self.linear(f"layers.{layer}.self_attn.{name}_proj", x).reshape(len(x), -1, self.head_dim)
        if name == "v":
            return y
        weight = self.tensors.get(f"{self.prefix}layers.{layer}.self_attn.{name}_norm.weight")
        return self.rope(y if weight is None else norm(y, weight, self.eps), positions)

    def attend(self, layer, q, k, v, seen):
        """Attention of each query over the keys that `seen` [queries, keys] lets it see, and the output projection."""
        out = np.empty((len(q), self.heads, self.head_dim))
        for head in range(self.heads):
            kv = head // (self.heads // self.kv_heads)
            scores = np.where(seen, q[:, head] @ k[:, kv].T / np.sqrt(self.head_dim), -np.inf)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = scores / scores.sum(-1, keepdims=True) @ v[:, kv]
        return self.linear(f"layers.{layer}.self_attn.o_proj", out.reshape(len(q), -1))

    def mlp(self, layer, x):
        name = f"layers.{layer}.mlp."
        h = norm(x, self[f"layers.{layer}.post_attention_layernorm.weight"], self.eps)
        gate = self.linear(name + "gate_proj", h)
        return x + self.linear(name + "down_proj", gate / (1 + np.exp(-gate)) * self.linear(name + "up_proj", h))


class Target:
    """Qwen3 or Llama."""

    def __init__(self, folder: Path):
        config = json.loads((folder / "config.json").read_text())
        self.weights = Weights(folder, config, "model.")
        self.embedding = self.weights["embed_tokens.weight"]
        self.head = self.embedding if config.get("tie_word_embeddings") else self.weights.tensors["lm_head.weight"]
        number = self.weights.layers
        self.windows = [None] * number
        if config["architectures"] == ["Qwen3ForCausalLM"] and config.get("use_sliding_window"):
            types = config.get("layer_types") or [
                "sliding_attention" if i >= config["max_window_layers"] else "full_attention" for i in range(number)
            ]
            self.windows = [config["sliding_window"] if kind == "sliding_attention" else None for kind in types]

    def __call__(self, tokens):
        """Logits of every position, and what transformers has in `hidden_states[1:]`: the last is after the norm."""
        w, positions = self.weights, np.arange(len(tokens))
        x, after = self.embedding[tokens], []
        for i in range(w.layers):
            h = norm(x, w[f"layers.{i}.input_layernorm.weight"], w.eps)
            q, k, v = (w.project(i, name, h, positions) for name in "qkv")
            x = x + w.attend(i, q, k, v, window_seen(positions, positions, self.windows[i], causal=True))
            x = w.mlp(i, x)
            after.append(x)
        hidden = norm(x, w["norm.weight"], w.eps)
        return hidden @ self.head.T, [*after[:-1], hidden]


class Drafter:
    """DFlash, checkpoint-native or in the speculators format."""

    def __init__(self, folder: Path, target: Target):
        config = json.loads((folder / "config.json").read_text())
        shift = 0
        if config.get("speculators_model_type"):
            config = {**config["transformer_layer_config"], **config}
            shift, ids = 1, config["aux_hidden_state_layer_ids"]
            dflash = {"mask_token_id": config["mask_token_id"]}
        else:
            dflash = config["dflash_config"]
            ids = dflash.get("target_layer_ids")
        self.weights = Weights(folder, config, "")
        self.target = target
        self.taps = [i - shift for i in ids] if ids else default_taps(target.weights.layers, self.weights.layers)
        self.mask_token = dflash["mask_token_id"]
        self.block_size = config.get("block_size") or dflash["block_size"]
        self.masks = layer_masks(config, dflash)

    def context(self, after):
        """What the drafter sees of each token that the target has processed."""
        w = self.weights
        features = np.concatenate([after[i] for i in self.taps], axis=-1)
        return norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], w.eps)

    def __call__(self, context, anchor):
        """Hidden states of the block that begins with the anchor, at the position after the context."""
        w, n = self.weights, len(context)
        before, block = np.arange(n), n + np.arange(self.block_size)
        x = self.target.embedding[[anchor] + [self.mask_token] * (self.block_size - 1)]
        for i, (window, causal) in enumerate(self.masks):
            h = norm(x, w[f"layers.{i}.input_layernorm.weight"], w.eps)
            q = w.project(i, "q", h, block)
            k, v = (
                np.concatenate([w.project(i, name, context, before), w.project(i, name, h, block)]) for name in "kv"
            )
            x = x + w.attend(i, q, k, v, window_seen(block, np.arange(n + self.block_size), window, causal))
            x = w.mlp(i, x)
        return norm(x, w["norm.weight"], w.eps)

    def logits(self, hidden):
        return hidden @ self.weights.tensors.get("lm_head.weight", self.target.head).T

    def tokens(self, logits):
        chosen = logits.argmax(-1)
        shift = self.weights.tensors.get("d2t")
        return chosen if shift is None else chosen + shift[chosen].astype(int)


def window_seen(queries, keys, window, causal):
    """Whether the query at position i sees the key at position j, pair by pair."""

    def sees(i, j):
        if causal and j > i:
            return False
        return window is None or abs(i - j) < window

    return np.array([[sees(i, j) for j in keys] for i in queries])


def default_taps(target_layers, draft_layers):
    if draft_layers == 1:
        return [target_layers // 2]
    first, last = 1, target_layers - 3
    return [round(first + i * (last - first) / (draft_layers - 1)) for i in range(draft_layers)]


def layer_masks(config, dflash):
    """(window, causal) of every drafter layer."""
    number = config["num_hidden_layers"]
    window = config.get("sliding_window") or dflash.get("swa_window_size")
    types = config.get("layer_types")
    sliding_causal = not config.get("sliding_window_non_causal", False)
    if types is None and dflash.get("use_swa"):
        types, sliding_causal = ["sliding_attention"] * number, False
    types = types or ["full_attention"] * number
    masks = [(window, sliding_causal) if kind == "sliding_attention" else (None, False) for kind in types]
    override = dflash["causal"] if "causal" in dflash else config.get("is_causal")
    return masks if override is None else [(w, override) for w, _ in masks]


@dataclass
class Completion:
    """What greedy speculation gives. `margin` is how clearly the closest of all decisions was taken."""

    tokens: list[int] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    margin: float = np.inf


def complete(target: Target, drafter: Drafter, prompt: list[int], max_tokens: int) -> Completion:
    """Draft, verify, commit until there are max_tokens; the last round may overshoot and is cut."""
    found = Completion()

    def decided(logits):
        best = np.sort(logits, axis=-1)
        gap = (best[..., -1] - best[..., -2]) / np.abs(logits).max()
        found.margin = min(found.margin, gap.min())
        return logits

    logits, after = target(prompt)
    known = [*prompt, int(decided(logits[-1]).argmax())]  # all but the anchor are processed
    while len(known) - len(prompt) < max_tokens:
        n, context = len(known) - 1, drafter.context([layer[: len(known) - 1] for layer in after])
        block_logits = drafter.logits(drafter(context, known[n]))
        drafts = drafter.tokens(decided(block_logits[1:])).tolist()
        logits, after = target(known + drafts)
        wanted = decided(logits[n:]).argmax(-1).tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == wanted[accepted]:
            accepted += 1
        known += wanted[: accepted + 1]
        found.acceptance_lengths.append(accepted + 1)
    found.tokens = known[len(prompt) :][:max_tokens]
    return found
