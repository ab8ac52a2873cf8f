"""Qwen3 and Llama, the target models. Llama is Qwen3 without the norms of queries and keys."""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from dflash_jax.models.layers import DecoderLayer, KVCache, rms_norm, rope_tables, run_layers
from dflash_jax.parallel.collectives import Devices, likeliest_product, look_up
from dflash_jax.spec import TargetConfig
from dflash_jax.weights.formats.weight import logits_of
from dflash_jax.weights.tables import declare, outer_table
from pallas_kernels.lib.rotary import split_heads


class TargetModel(nn.Module):
    """A decoder-only language model whose hidden states can be tapped; `devices` are those of its layers.

    Source: transformers' Qwen3ForCausalLM and LlamaForCausalLM.
    """

    config: TargetConfig
    devices: Devices | None = None

    def setup(self) -> None:
        self.weights = declare(self, outer_table(self.config), self.config)
        self.layers = [DecoderLayer(self.config, i, self.devices) for i in range(self.config.num_hidden_layers)]

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache,
        taps: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T C"], KVCache]:
        """Run T tokens of each sequence, storing their keys and values.

        Args:
            tokens: token ids, int32.
            positions: absolute positions; negative ones are padding, which is neither stored nor seen.
            cache: holds the keys and values of all earlier positions.
            taps: layers whose residual output is wanted.

        Returns:
            Final hidden states after the last norm; the taps' outputs side by side (C = len(taps) * D); the
            cache.
        """
        x = self.embed(tokens)
        outputs, hidden, cache = run_layers(self.config, self.layers, x, self.weights["norm"], positions, cache)
        assert isinstance(hidden, Array), "a drafter alone is quantised"
        return hidden, _side_by_side(x, outputs, taps), cache

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache,
        taps: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B 1 D"], Float[Array, "B T C"], Float[Array, "B T D"], KVCache]:
        """The same of tokens of which only the last one's final hidden state is wanted, until `finish` asks for more.

        The last layer stores all keys and values, but computes the rest of itself for that token alone, unless it is
        tapped: with L layers this saves up to 1/L of the time.

        Returns:
            The final hidden state of the last token of each sequence, padding apart; the taps' outputs; what goes into
            the last layer; the cache.
        """
        x = self.embed(tokens)
        *layers, last = self.layers
        outputs, h, cache = run_layers(self.config, layers, x, last.norms["input_layernorm"], positions, cache)
        before = [x, *outputs][-1]
        q, cache = last.write(h, rope_tables(self.config, positions), positions, cache)
        norm, kv_length, end = self.weights["norm"], positions.max(axis=1) + 1, positions.argmax(axis=1)
        if last.index in taps:
            after, hidden = last.attend(before, q, norm, positions, kv_length, cache)
            assert isinstance(hidden, Array)
            return _row(hidden, end), _side_by_side(x, [*outputs, after], taps), before, cache
        _, hidden = last.attend(_row(before, end), _row(q, end), norm, _row(positions, end), kv_length, cache)
        assert isinstance(hidden, Array)
        return hidden, _side_by_side(x, outputs, taps), before, cache

    def finish(
        self, before: Float[Array, "B T D"], positions: Int[Array, "B T"], cache: KVCache
    ) -> Float[Array, "B T D"]:
        """The final hidden states of all tokens of a `prefill`.

        Args:
            before: what goes into the last layer.
            positions: as there.
            cache: as it was after that.
        """
        last = self.layers[-1]
        h = rms_norm(before, last.norms["input_layernorm"], self.config.rms_norm_eps)
        q, _, _ = split_heads(*last.self_attn.heads(h, rope_tables(self.config, positions)))
        _, hidden = last.attend(before, q, self.weights["norm"], positions, positions.max(axis=1) + 1, cache)
        assert isinstance(hidden, Array)
        return hidden

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Token embeddings; the drafter shares them."""
        return look_up(self.weights["embed_tokens"], tokens, self.devices)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """float32 logits."""
        return logits_of(hidden, self.head)

    def likeliest(
        self, hidden: Float[Array, "B T D"], length: Int[Array, ""] | None = None
    ) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
        """The token of the largest logit of each row, and that logit; the others are not kept.

        Of the B * T rows the first `length` are wanted, or all.
        """
        return likeliest_product(hidden, self.head, self.devices, length)

    @property
    def head(self) -> Float[Array, "V D"]:
        """The output head, which is the embedding where they are tied; the drafter shares it."""
        return self.weights.get("lm_head", self.weights["embed_tokens"])


def _side_by_side(
    x: Float[Array, "B T D"], outputs: list[Float[Array, "B T D"]], taps: tuple[int, ...]
) -> Float[Array, "B T C"]:
    """What the tapped layers gave; of no width where there are none."""
    return jnp.concatenate([x[..., :0], *(outputs[i] for i in taps)], axis=-1)


def _row(array: Shaped[Array, "B T *_"], index: Int[Array, " B"]) -> Shaped[Array, "B 1 *_"]:
    """One token of each sequence."""
    return jax.vmap(partial(lax.dynamic_slice_in_dim, slice_size=1))(array, index)
