"""Qwen3 and Llama, the target models. Llama is Qwen3 without the norms of queries and keys."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from dflash_jax.config import TargetConfig
from dflash_jax.models.layers import DecoderLayer, KVCache, run_layers
from dflash_jax.models.quantized import Quantized
from dflash_jax.models.tables import declare, outer_table


class TargetModel(nn.Module):
    """A decoder-only language model whose hidden states can be tapped; `mesh` is that of its layers.

    Source: transformers' Qwen3ForCausalLM and LlamaForCausalLM.
    """

    config: TargetConfig
    mesh: Mesh | None = None

    def setup(self) -> None:
        self.weights = declare(self, outer_table(self.config), self.config)
        self.layers = [DecoderLayer(self.config, i, self.mesh) for i in range(self.config.num_hidden_layers)]

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
        outputs, hidden, cache = run_layers(self.layers, x, self.weights["norm"], positions, cache)
        features = jnp.concatenate([x[..., :0], *(outputs[i] for i in taps)], axis=-1)
        return hidden, features, cache

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Token embeddings; the drafter shares them."""
        return self.weights["embed_tokens"][tokens]

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """float32 logits."""
        return logits_of(hidden, self.head)

    @property
    def head(self) -> Float[Array, "V D"]:
        """The output head, which is the embedding where they are tied; the drafter shares it."""
        return self.weights.get("lm_head", self.weights["embed_tokens"])


def logits_of(hidden: Float[Array, "B T D"], weight: Float[Array, "V D"] | Quantized) -> Float[Array, "B T V"]:
    """Logits in float32, accumulated in float32."""
    if isinstance(weight, Quantized):
        return weight.product(hidden.reshape(-1, hidden.shape[-1])).reshape(*hidden.shape[:2], -1)
    precision = lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None
    return jnp.einsum("btd,vd->btv", hidden, weight, precision=precision, preferred_element_type=jnp.float32)
