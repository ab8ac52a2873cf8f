"""What the `config.json` of a mixture of experts says beyond a dense model's.

Source: transformers' Qwen3MoeConfig, Qwen3NextConfig and Qwen3_5MoeTextConfig, whose defaults these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflash_jax.base.values import is_int
from dflash_jax.spec.fields import Fields
from dflash_jax.spec.model import Dense, Experts, LayerSpec


@dataclass(frozen=True)
class Family:
    """How the files of an architecture describe experts.

    Attributes:
        defaults: values of fields that a file may leave out.
        renormalizes: whether weights of chosen experts are divided by their sum; None leaves it to `norm_topk_prob`.
        has_shared: whether an expert sees every token.
        has_dense_layers: whether `mlp_only_layers` and `decoder_sparse_step` may leave layers without experts.
    """

    defaults: Mapping[str, Any]
    renormalizes: bool | None
    has_shared: bool
    has_dense_layers: bool


_QWEN3_5 = Family(
    {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    renormalizes=True,
    has_shared=True,
    has_dense_layers=False,
)
FAMILIES: Mapping[str, Family] = {
    "Qwen3MoeForCausalLM": Family(
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False},
        renormalizes=None,
        has_shared=False,
        has_dense_layers=True,
    ),
    "Qwen3NextForCausalLM": Family(
        {
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
        renormalizes=None,
        has_shared=True,
        has_dense_layers=True,
    ),
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5,
}
ARCHITECTURES = tuple(FAMILIES)


def with_experts(layers: tuple[LayerSpec, ...], fields: Fields, architecture: str) -> tuple[LayerSpec, ...]:
    """The layers with a mixture of experts in those that have one.

    Args:
        layers: with dense MLPs.
        fields: of the language model.
        architecture: one of any; those outside of `ARCHITECTURES` have no experts.

    Raises:
        ConfigError: an impossible number of experts, or a wrong `mlp_only_layers`.
    """
    family = FAMILIES.get(architecture)
    if family is None:
        return layers
    # transformers writes `num_local_experts` for Qwen3-MoE, and reads either name.
    present = {name: value for name, value in fields.raw.items() if value is not None}
    count = {"num_experts": present.get("num_local_experts", family.defaults["num_experts"])}
    fields = Fields({**family.defaults, **count, **present}, fields.where)
    dense = _dense_layers(fields, len(layers)) if family.has_dense_layers else set()
    experts = _experts(fields, family)
    return tuple(layer if i in dense else replace(layer, mlp=experts) for i, layer in enumerate(layers))


def has_dense_mlp(layers: tuple[LayerSpec, ...]) -> bool:
    """Whether a layer has a dense MLP, so that `intermediate_size` means something."""
    return any(layer.mlp == Dense() for layer in layers)


def _experts(fields: Fields, family: Family) -> Experts:
    count, per_token = fields.positive_int("num_experts"), fields.positive_int("num_experts_per_tok")
    if per_token > count:
        raise fields.error(f"num_experts_per_tok={per_token} must be at most num_experts={count}.")
    return Experts(
        count=count,
        per_token=per_token,
        width=fields.positive_int("moe_intermediate_size"),
        renormalize=fields.flag("norm_topk_prob") if family.renormalizes is None else family.renormalizes,
        shared_width=fields.positive_int("shared_expert_intermediate_size") if family.has_shared else None,
    )


def _dense_layers(fields: Fields, num_layers: int) -> set[int]:
    """Indices of the layers without experts."""
    named = fields.get("mlp_only_layers", [])
    if not isinstance(named, list | tuple) or not all(is_int(i) and 0 <= i < num_layers for i in named):
        raise fields.error(f"mlp_only_layers={named!r} must be a list of layers from 0 to {num_layers - 1}.")
    step = fields.positive_int("decoder_sparse_step", 1)
    return {*named, *(i for i in range(num_layers) if (i + 1) % step)}
