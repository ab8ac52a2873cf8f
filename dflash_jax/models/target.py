"""The target models, Qwen3 and Llama; Llama is Qwen3 without norms of queries and keys."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from dflash_jax.models.caches import KVCache
from dflash_jax.models.layers import DecoderLayer
from dflash_jax.models.mixers.attention import Queries
from dflash_jax.models.projections import likeliest_product
from dflash_jax.models.rope import rope_tables
from dflash_jax.models.run import run_layers
from dflash_jax.parallel.collectives import AUTOMATIC, Devices, look_up
from dflash_jax.spec import TargetConfig
from dflash_jax.weights.formats.protocol import Weight, plain
from dflash_jax.weights.formats.screened import ScreenedHead
from dflash_jax.weights.formats.weight import logits_of
from dflash_jax.weights.parameters import declare
from dflash_jax.weights.tables import outer_table
from pallas_kernels.gated_delta import Weights
from pallas_kernels.lib.norm import rms_norm
from pallas_kernels.lib.rotary import gates_of, split_heads


class TargetModel(nn.Module):
    """A decoder-only language model that can return the residual stream after chosen layers (capture layers).

    Source: transformers' Qwen3ForCausalLM, LlamaForCausalLM and Qwen3_5ForCausalLM.
    """

    config: TargetConfig
    devices: Devices = AUTOMATIC

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
            positions: absolute positions, int32; negative ones are padding, which is neither stored nor seen.
            cache: keys and values of all earlier positions.
            taps: capture layers: i stands for Hugging Face's `hidden_states[i + 1]`, the residual stream after layer i
                and, for the last layer, the final hidden state.

        Returns:
            Final hidden states, normed; features, the capture layers' outputs side by side (C = len(taps) * D); the
            updated cache.
        """
        x = self.embed(tokens)
        ran = run_layers(self.config, self.layers, x, self.weights["norm"], positions, cache, taps)
        last = plain(ran.hidden, "the head of a target")
        return last, _side_by_side(x, ran.captured | {len(self.layers) - 1: last}, taps), ran.cache

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache,
        taps: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B 1 D"], Float[Array, "B T C"], Float[Array, "B T D"], KVCache]:
        """Run T tokens of each sequence, and give the final hidden state of the last token only.

        A last layer with attention stores all keys and values, but computes the rest for that token alone unless it is
        a capture layer: with L layers this saves up to 1/L of the time. `finish` computes the other hidden states.

        Args:
            tokens: token ids, int32.
            positions: absolute positions, int32; negative ones are padding.
            cache: what is kept of all earlier positions.
            taps: capture layers.

        Returns:
            Final hidden state of each sequence's last token that is not padding; features, as `__call__` gives them;
            what `finish` needs; the updated cache.
        """
        *layers, last = self.layers
        end = positions.argmax(axis=1)
        if not last.has_attention:  # the state needs every token
            hidden, features, cache = self(tokens, positions, cache, taps)
            return _row(hidden, end), features, hidden, cache
        x = self.embed(tokens)
        first_norm = last.norms["input_layernorm"]
        before, captured, h, cache = run_layers(self.config, layers, x, first_norm, positions, cache, taps)
        queries, cache = last.write(h, rope_tables(self.config, positions), positions, cache)
        norm, kv_length = self.weights["norm"], positions.max(axis=1) + 1
        if last.index in taps:
            _, after = last.attend(before, queries, norm, positions, kv_length, cache)
            hidden = plain(after, "the head of a target")
            return _row(hidden, end), _side_by_side(x, captured | {last.index: hidden}, taps), before, cache
        lone = jax.tree.map(lambda array: _row(array, end), queries)
        _, after = last.attend(_row(before, end), lone, norm, _row(positions, end), kv_length, cache)
        return plain(after, "the head of a target"), _side_by_side(x, captured, taps), before, cache

    def finish(
        self, before: Float[Array, "B T D"], positions: Int[Array, "B T"], cache: KVCache
    ) -> Float[Array, "B T D"]:
        """Final hidden states of all tokens of a `prefill`, normed.

        Args:
            before: what `prefill` gave for this: the residual stream before a last layer with attention, or the final
                hidden states themselves.
            positions: those of `prefill`.
            cache: the cache that `prefill` returned.
        """
        last = self.layers[-1]
        if not last.has_attention:
            return before
        h = rms_norm(before, last.norms["input_layernorm"], self.config.rms_norm_eps)
        heads, rotary = last.self_attn.heads(h, rope_tables(self.config, positions))
        queries = Queries(split_heads(heads, rotary)[0], gates_of(heads, rotary))
        _, hidden = last.attend(before, queries, self.weights["norm"], positions, positions.max(axis=1) + 1, cache)
        return plain(hidden, "the head of a target")

    def recurrent_weights(self) -> dict[int, Weights]:
        """Weights of convolution and gates, by the index of each Gated DeltaNet layer."""
        return {layer.index: layer.linear_attn.recurrent for layer in self.layers if not layer.has_attention}

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Token embeddings; the drafter uses them, too."""
        return look_up(self.weights["embed_tokens"], tokens, self.devices)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """float32 logits of normed hidden states; -inf for padding of the vocabulary."""
        logits, tokens = logits_of(hidden, self.head), self.config.num_tokens
        return logits if tokens is None else jnp.where(jnp.arange(logits.shape[-1]) < tokens, logits, -jnp.inf)

    def likeliest(
        self, hidden: Float[Array, "B T D"], length: Int[Array, ""] | None = None
    ) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
        """Argmax of each row's logits, int32, and its logit, float32; where possible no logits are kept.

        Args:
            hidden: normed hidden states.
            length: only the first `length` of the B * T rows are wanted; None is all.
        """
        return likeliest_product(hidden, self.head, self.devices, length, self.config.num_tokens)

    @property
    def head(self) -> Float[Array, "V D"] | Weight:
        """The output head; it is the embedding if they are tied."""
        head: Any = self.weights.get("lm_head", self.weights["embed_tokens"])
        screen: Any = self.get_variable("params", "screen")  # which no table declares
        return head if screen is None else ScreenedHead(head, screen)

    @property
    def draft_head(self) -> Float[Array, "V D"] | Weight:
        """The head for drafters that have none: its 8-bit copy, if there is one."""
        head = self.head
        return replace(head, is_exact=False) if isinstance(head, ScreenedHead) else head


def _side_by_side(
    x: Float[Array, "B T D"], outputs: dict[int, Float[Array, "B T D"]], taps: tuple[int, ...]
) -> Float[Array, "B T C"]:
    """Outputs of the capture layers side by side; C is 0 without any."""
    return jnp.concatenate([x[..., :0], *(outputs[i] for i in taps)], axis=-1)


def _row(array: Shaped[Array, "B T *_"], index: Int[Array, " B"]) -> Shaped[Array, "B 1 *_"]:
    """Select one token of each sequence."""
    return jax.vmap(partial(lax.dynamic_slice_in_dim, slice_size=1))(array, index)
