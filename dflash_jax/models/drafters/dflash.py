"""The DFlash drafter: a block-diffusion model that fills a whole block of tokens in one pass.

Source: arXiv 2602.06036, section 4. The drafter has neither embedding nor head of its own: both are the target's.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float, Int

from dflash_jax.models.layers import ContextCache, DecoderLayer, KVCache, run_layers
from dflash_jax.models.projections import likeliest_product
from dflash_jax.models.rope import rope_tables
from dflash_jax.parallel.collectives import AUTOMATIC, Devices
from dflash_jax.spec import DraftConfig
from dflash_jax.weights.formats.fp8 import CONTEXT
from dflash_jax.weights.formats.protocol import QuantizedRows, Weight
from dflash_jax.weights.formats.weight import project
from dflash_jax.weights.tables import declare, outer_table
from pallas_kernels.rotary import Rotary, rms_norm


class DraftModel(nn.Module):
    """Drafter layers over context features of the target and a block of mostly masked positions.

    The cache of a drafter holds context keys and values at positions 0..n-1. A block writes its own keys and
    values from position n on; they are garbage once the block is verified, and never seen again: the next
    context overwrites the accepted positions, the next block the rest. `devices` are those of the layers.
    """

    config: DraftConfig
    devices: Devices = AUTOMATIC

    def setup(self) -> None:
        self.weights = declare(self, outer_table(self.config), self.config)
        self.layers = [DecoderLayer(self.config, i, self.devices) for i in range(self.config.num_hidden_layers)]

    def write_context(
        self, features: Float[Array, "B T C"], positions: Int[Array, "B T"], cache: ContextCache
    ) -> ContextCache:
        """Turn tapped hidden states of processed tokens into context keys and values of every layer.

        Args:
            features: outputs of the tapped target layers, side by side in the order of `target_layer_ids`.
            positions: the tokens' absolute positions; negative ones are skipped.
            cache: the drafter's.
        """
        context = rms_norm(project(features, self.weights["fc"]), self.weights["hidden_norm"], self.config.rms_norm_eps)
        rotary = Rotary(*rope_tables(self.config, positions), eps=self.config.rms_norm_eps)
        k_norms = [layer.self_attn.weights.get("k_norm") for layer in self.layers]
        return cache.write_context(self._context_heads(context), rotary, k_norms, positions)

    def _context_heads(self, context: Float[Array, "B T D"]) -> list[Float[Array, "B T K _ H"]]:
        """Keys and values of every layer, of one product or of one each: no input norm, no MLP."""
        joined: Any = self.get_variable("params", CONTEXT)  # undeclared where one array has those of all layers
        if joined is None:
            return [layer.self_attn.keys_values(context) for layer in self.layers]
        return [project(context, joined, self.get_variable("params", f"{CONTEXT}_bias"))]

    def __call__(
        self, block: Float[Array, "B G D"], positions: Int[Array, "B G"], cache: KVCache
    ) -> tuple[Float[Array, "B G D"] | QuantizedRows, KVCache]:
        """Hidden states of a block after the last norm; row j (from 1) predicts the token AT its position.

        Args:
            block: embeddings of the anchor and of G-1 mask tokens.
            positions: n..n+G-1 where n is the length of the context; negative rows belong to idle sequences.
            cache: the drafter's, with context at positions 0..n-1.
        """
        _, hidden, cache = run_layers(self.config, self.layers, block, self.weights["norm"], positions, cache)
        return hidden, cache

    def tokens(
        self, hidden: Float[Array, "B T D"] | QuantizedRows, target_head: Float[Array, "V D"] | Weight
    ) -> Int[Array, "B T"]:
        """The likeliest token of each row, in the target's vocabulary."""
        own_head: Any = self.get_variable("params", "lm_head")  # undeclared where it is an fp8 copy of the target's
        drafted, _ = likeliest_product(hidden, target_head if own_head is None else own_head, self.devices)
        return drafted + self.weights["d2t"][drafted] if "d2t" in self.weights else drafted
