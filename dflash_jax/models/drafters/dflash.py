"""The DFlash drafter: a block-diffusion model that fills a whole block of tokens in one pass.

It uses the target's embedding, and the target's head unless it has its own. Source: arXiv 2602.06036, section 4.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float, Int

from dflash_jax.models.caches import ContextCache, KVCache
from dflash_jax.models.layers import DecoderLayer
from dflash_jax.models.projections import likeliest_product, project_whole
from dflash_jax.models.rope import rope_tables
from dflash_jax.models.run import run_layers
from dflash_jax.parallel.collectives import AUTOMATIC, Devices
from dflash_jax.spec import DraftConfig
from dflash_jax.weights.formats.fp8 import CONTEXT
from dflash_jax.weights.formats.protocol import QuantizedRows, Weight
from dflash_jax.weights.formats.weight import project
from dflash_jax.weights.parameters import declare
from dflash_jax.weights.tables import outer_table
from pallas_kernels.lib.norm import rms_norm
from pallas_kernels.lib.rotary import Rotary


class DraftModel(nn.Module):
    """Drafter layers over context features of the target and a block of mostly masked positions.

    The drafter's cache holds context keys and values at positions 0..n-1. A block writes its own keys and values from
    position n on. They are invalid once the block is verified and are never read again: the next context overwrites
    those of accepted positions, the next block the rest.
    """

    config: DraftConfig
    devices: Devices = AUTOMATIC

    def setup(self) -> None:
        self.weights = declare(self, outer_table(self.config), self.config)
        self.layers = [DecoderLayer(self.config, i, self.devices) for i in range(self.config.num_hidden_layers)]

    def write_context(
        self, features: Float[Array, "B T C"], positions: Int[Array, "B T"], cache: ContextCache
    ) -> ContextCache:
        """Store context keys and values of every layer, projected from the target's features of processed tokens.

        Args:
            features: outputs of the target's capture layers, side by side in the order of `target_layer_ids`.
            positions: absolute positions of the tokens, int32; tokens at negative ones are skipped.
            cache: the drafter's.
        """
        projected = project_whole(features, self.weights["fc"], self.devices)
        context = rms_norm(projected, self.weights["hidden_norm"], self.config.rms_norm_eps)
        rotary = Rotary(*rope_tables(self.config, positions), eps=self.config.rms_norm_eps)
        k_norms = [layer.self_attn.weights.get("k_norm") for layer in self.layers]
        return cache.write_context(self._context_heads(context), rotary, k_norms, positions)

    def _context_heads(self, context: Float[Array, "B T D"]) -> list[Float[Array, "B T K _ H"]]:
        """Project the context to keys and values of every layer, by one product if the weights are joined."""
        joined: Any = self.get_variable("params", CONTEXT)  # only fp8 drafters have it, and no table declares it
        if joined is None:
            return [layer.self_attn.keys_values(context) for layer in self.layers]
        return [project(context, joined, self.get_variable("params", f"{CONTEXT}_bias"))]

    def __call__(
        self, block: Float[Array, "B G D"], positions: Int[Array, "B G"], cache: KVCache
    ) -> tuple[Float[Array, "B G D"] | QuantizedRows, KVCache]:
        """Final hidden states of a block, normed; row j, from 1 on, predicts the token AT its own position.

        Args:
            block: embeddings of the anchor and of G-1 mask tokens.
            positions: n..n+G-1, int32, where n is the length of the context; rows of idle sequences are negative.
            cache: the drafter's, with context at positions 0..n-1.
        """
        ran = run_layers(self.config, self.layers, block, self.weights["norm"], positions, cache)
        return ran.hidden, ran.cache

    def tokens(
        self,
        hidden: Float[Array, "B T D"] | QuantizedRows,
        target_head: Float[Array, "V D"] | Weight,
        limit: int | None = None,
    ) -> Int[Array, "B T"]:
        """Argmax of each row's logits, int32, as a token of the target's vocabulary.

        Args:
            hidden: what `__call__` returns.
            target_head: the target's head, which a drafter without one uses.
            limit: only the first `limit` rows of the vocabulary are tokens, which the target emits; None is all.
        """
        # A head of its own, or a copy of the target's in another format, which no table declares.
        draft_head: Any = self.get_variable("params", "lm_head")
        head = target_head if draft_head is None else draft_head
        if "d2t" not in self.weights:
            return likeliest_product(hidden, head, self.devices, limit=limit)[0]
        drafted, _ = likeliest_product(hidden, head, self.devices)
        return drafted + self.weights["d2t"][drafted]
