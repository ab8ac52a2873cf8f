"""Reading a DFlash drafter's `config.json`, native or in the speculators format, and checking it against a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_jax.base.errors import ConfigError
from dflash_jax.base.values import is_int
from dflash_jax.spec.fields import Fields
from dflash_jax.spec.model import DraftConfig, LayerSpec, TargetConfig
from dflash_jax.spec.target import ARCHITECTURES as TARGETS
from dflash_jax.spec.target import DRAFTERS, decoder_fields, layer_windows, weight_block_size

# Fields of other drafter families that change the computation, with the value that changes nothing: refused if set to
# another one, never ignored.
UNSUPPORTED_FIELDS = {
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "conv_group_size": 0,  # DFlash2
    "conv_kernel_size": 0,
    "dspark_draft_topk": 0,
    "fc_layernorm": False,
    "final_logit_softcapping": 0.0,
    "input_embedding_scale": 1.0,
    "logit_scale": 1.0,
    "output_multiplier": 1.0,
    "projector_type": "dflash",
    "sample_from_anchor": False,  # DSpark
    "selector_rank": 0,  # DFlash2
    "selector_top_k": 0,
    "shift_label": False,
}


def draft_config(
    raw: Mapping[str, Any],
    where: str = "config.json",
    *,
    num_target_layers: int | None = None,
    fc_inputs: int | None = None,
) -> DraftConfig:
    """Read a drafter's `config.json`, native or in the speculators format.

    Args:
        raw: the parsed file.
        where: the file's name in errors.
        num_target_layers: layers of the target; used for the default capture layers if the file has no such number.
        fc_inputs: columns of the weight `fc`, which takes the features of all capture layers; None if it is not known.
            It says how many capture layers there are; a file that names none needs it.

    Raises:
        ConfigError: unknown architecture, missing field or impossible value.

    Source: arXiv 2602.06036; vLLM PR #40898 for the speculators fields and #40727 for their layer ids.
    """
    fields = Fields(_from_speculators(raw, where), where)
    advice = "is a target, not a DFlash drafter; give a drafter's folder as --draft-model."
    fields.architecture(DRAFTERS, TARGETS, advice)
    dflash = fields.sub("dflash_config")
    for name, neutral in UNSUPPORTED_FIELDS.items():
        for source in (fields, dflash):
            value = source.get(name, neutral)
            if value != neutral:
                raise source.error(f"{name}={value!r} is not supported; use a plain DFlash drafter.")
    mask_token_id = dflash.get("mask_token_id", fields.get("mask_token_id"))
    if mask_token_id is None:
        raise fields.error("no mask token: set dflash_config.mask_token_id.")
    if not is_int(mask_token_id) or mask_token_id < 0:
        raise fields.error(f"mask_token_id={mask_token_id!r} must be a token id of at least 0.")
    outer, inner = fields.get("block_size"), dflash.get("block_size")
    if outer is not None and inner not in (None, outer):
        raise fields.error(f"block_size={outer!r} but dflash_config has {inner!r}; keep one of them.")
    block_size = Fields({"block_size": inner if outer is None else outer}, where).positive_int("block_size")
    if block_size < 2:
        raise fields.error(f"block_size={block_size} drafts nothing; it must be at least 2 (an anchor and one draft).")
    decoder = decoder_fields(fields, qk_norm=True, default_head_dim=128)
    num_layers = fields.positive_int("num_hidden_layers")
    target_hidden = fields.positive_int("target_hidden_size", decoder["hidden_size"])
    num_taps = None if fc_inputs is None else _num_taps(fields, fc_inputs, target_hidden)
    draft_vocab = fields.positive_int("draft_vocab_size", decoder["vocab_size"])
    if draft_vocab > decoder["vocab_size"]:
        raise fields.error(f"draft_vocab_size={draft_vocab} exceeds vocab_size={decoder['vocab_size']}.")
    return DraftConfig(
        **decoder,
        layers=_draft_layers(fields, dflash, num_layers),
        block_size=block_size,
        target_layer_ids=_tap_ids(fields, dflash, num_taps, num_target_layers),
        mask_token_id=mask_token_id,
        target_hidden_size=target_hidden,
        draft_vocab_size=None if draft_vocab == decoder["vocab_size"] else draft_vocab,
        weight_block_size=weight_block_size(fields),
    )


def check_draft_fits(target: TargetConfig, draft: DraftConfig, where: str) -> None:
    """Check that the drafter can use this target's hidden states, embedding and head.

    Raises:
        ConfigError: sizes, vocabulary, mask token or capture layers do not fit.
    """
    beyond = [i for i in draft.target_layer_ids if not 0 <= i < target.num_hidden_layers]
    checks = [
        (
            draft.hidden_size == draft.target_hidden_size == target.hidden_size,
            f"hidden_size={draft.hidden_size} (target_hidden_size={draft.target_hidden_size}) but the target has "
            f"{target.hidden_size}",
        ),
        (
            draft.vocab_size == target.vocab_size,
            f"vocab_size={draft.vocab_size} but the target has {target.vocab_size}",
        ),
        (
            draft.mask_token_id < target.vocab_size,
            f"mask_token_id={draft.mask_token_id} but the target has {target.vocab_size} tokens",
        ),
        (not beyond, f"capture layers {beyond} but the target has layers 0 to {target.num_hidden_layers - 1}"),
    ]
    for fits, problem in checks:
        if not fits:
            raise ConfigError(f"{where}: the drafter has {problem}; use the drafter that was trained for this target.")


def _draft_layers(fields: Fields, dflash: Fields, num_layers: int) -> tuple[LayerSpec, ...]:
    """Full layers see the whole block and sliding layers are causal, unless `is_causal` or `causal` sets all layers.

    `dflash_config.use_swa` without `layer_types` makes every layer sliding and non-causal, as in vLLM.
    """
    raw = dict(fields.raw)
    if raw.get("sliding_window") is None:
        raw["sliding_window"] = dflash.get("swa_window_size")
    sliding_is_causal = not fields.flag("sliding_window_non_causal")
    if dflash.flag("use_swa") and raw.get("layer_types") is None:
        raw["layer_types"] = ["sliding_attention"] * num_layers
        sliding_is_causal = False
    windows = layer_windows(Fields(raw, fields.where), num_layers)
    for source, name in ((dflash, "causal"), (fields, "is_causal")):
        if source.get(name) is not None:
            return tuple(LayerSpec.attention(window, causal=source.flag(name)) for window in windows)
    return tuple(LayerSpec.attention(window, causal=window is not None and sliding_is_causal) for window in windows)


def _num_taps(fields: Fields, fc_inputs: int, target_hidden: int) -> int:
    """The number of capture layers whose features `fc` takes side by side."""
    if fc_inputs % target_hidden or not fc_inputs:
        raise fields.error(
            f"the weight fc takes {fc_inputs} inputs, which is no multiple of target_hidden_size={target_hidden}; "
            "check that config.json and the weights belong together."
        )
    return fc_inputs // target_hidden


def _tap_ids(fields: Fields, dflash: Fields, num_taps: int | None, num_target_layers: int | None) -> tuple[int, ...]:
    """Capture layers as `DraftConfig` has them: id i is the residual stream after target layer i.

    `aux_hidden_state_layer_ids` (speculators) and `eagle_aux_hidden_state_layer_ids` (vLLM) count the embedding as 0,
    so their ids are one higher.
    """
    by_field: dict[str, tuple[int, ...]] = {}
    for source, name, shift in (
        (dflash, "target_layer_ids", 0),
        (fields, "target_layer_ids", 0),
        (fields, "aux_hidden_state_layer_ids", 1),
        (fields, "eagle_aux_hidden_state_layer_ids", 1),
    ):
        ids = source.get(name)
        if ids is None:
            continue
        if not isinstance(ids, list | tuple) or not ids or not all(is_int(i) for i in ids):
            raise source.error(f"{name}={ids!r} must be a list of layer ids.")
        by_field.setdefault(name, tuple(i - shift for i in ids))
    if len(set(by_field.values())) > 1:
        raise fields.error(
            "the capture layers contradict each other: "
            + ", ".join(f"{name} means layers {list(ids)}" for name, ids in by_field.items())
            + "; keep one of them."
        )
    if by_field:
        name, taps = next(iter(by_field.items()))
        if num_taps not in (None, len(taps)):
            raise fields.error(
                f"{name} names {len(taps)} capture layers, but the weight fc takes the features of {num_taps}; check "
                "that config.json and the weights belong together."
            )
        return taps
    if num_taps is None or fields.get("num_target_layers", num_target_layers) is None:
        raise fields.error("the capture layers are unknown: set dflash_config.target_layer_ids.")
    return default_target_layer_ids(fields.positive_int("num_target_layers", num_target_layers), num_taps)


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Capture layers of a drafter that names none: evenly from the second to the third-to-last target layer."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))


def _from_speculators(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a speculators file at one level: its decoder fields are nested in `transformer_layer_config`."""
    kind = raw.get("speculators_model_type")
    if kind is None:
        return dict(raw)
    if kind != "dflash":
        raise ConfigError(f"{where}: speculators_model_type={kind!r} is not supported; supported is 'dflash'.")
    layer = Fields(raw, where).sub("transformer_layer_config").raw
    if not layer:
        raise ConfigError(f"{where}: the field 'transformer_layer_config' is missing; add it to the file.")
    outer = {name: value for name, value in raw.items() if value is not None and name != "transformer_layer_config"}
    return {**layer, **outer, "architectures": ["DFlashSpeculator"]}
