"""How checkpoints name and group the tensors of a target, where published files of one architecture differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dflash_jax.spec import DraftConfig, TargetConfig
from dflash_jax.spec.hybrid import ARCHITECTURES as HYBRIDS
from dflash_jax.spec.hybrid import NEXT

# How names of a target's tensors begin, and how that of its head does: text alone; Qwen3.5 as published; MLX.
PREFIXES: Mapping[str, str] = {"model.": "", "model.language_model.": "", "language_model.model.": "language_model."}
STACKED = re.compile(r"\.experts\.gate_up_proj$")  # Qwen3.5 as published in 16 bits
SKIPPED = re.compile(r"^model\.(visual)\.|^(mtp)\.")  # what a hybrid's checkpoint holds beside the language model
APART = re.compile(r"\.experts\.\d+\.gate_proj\.")  # Qwen3, Qwen3-Next, and quantised Qwen3.5


@dataclass(frozen=True)
class Naming:
    """How a checkpoint names tensors.

    Attributes:
        prefix: how names begin; for targets one of `PREFIXES`.
        experts_apart: whether the matrices of each expert are tensors of their own, else those of all are stacked.
        key_heads_together: whether the inputs of Gated DeltaNet are projected by one tensor in which the rows of a key
            head lie side by side (Qwen3-Next), else by one for queries, keys and values and one for output gates.
    """

    prefix: str
    experts_apart: bool = False
    key_heads_together: bool = False

    @property
    def head(self) -> str:
        """The name of the output head's weight."""
        return f"{PREFIXES.get(self.prefix, '')}lm_head.weight"


def default_naming(config: TargetConfig | DraftConfig) -> Naming:
    """The names in files that we write, which are those of transformers' models for text."""
    if not isinstance(config, TargetConfig):
        return Naming("")
    is_next = config.architecture == NEXT
    is_apart = is_next or config.architecture == "Qwen3MoeForCausalLM"
    return Naming("model.", experts_apart=is_apart, key_heads_together=is_next)


def naming_of(names: Iterable[str], config: TargetConfig | DraftConfig) -> Naming:
    """How a checkpoint names the tensors of a model, by the names that it holds.

    Args:
        names: of all tensors in the checkpoint. Those beside the language model do not count: published quantised
            files have its experts apart, and a built-in drafter's stacked, as it was.
        config: the model's; drafters and dense targets without recurrent layers have one naming only.
    """
    names, usual = list(names), default_naming(config)
    if not isinstance(config, TargetConfig):
        return usual
    if config.architecture in HYBRIDS:
        names = [name for name in names if SKIPPED.match(name) is None]
        longest_first = sorted(PREFIXES, key=len, reverse=True)
        usual = replace(usual, prefix=next((p for p in longest_first if any(n.startswith(p) for n in names)), "model."))
    if any(map(STACKED.search, names)):
        return replace(usual, experts_apart=False)
    return replace(usual, experts_apart=usual.experts_apart or any(map(APART.search, names)))
