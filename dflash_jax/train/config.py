"""Options of a training run, from flags and from a preset in `configs/train/`; they are kept beside the checkpoints."""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from dflash_jax.base.errors import ConfigError
from dflash_jax.spec import DraftConfig, TargetConfig
from dflash_jax.spec.draft import default_target_layer_ids, draft_config
from dflash_jax.train.objective import Loss

MASK_TOKENS = ("<|mask|>", "<|MASK|>", "[MASK]", "<mask>")
# A run may be resumed with other values of these: they change neither what was trained nor what was held out.
FREE = ("eval_every", "eval_max_tokens", "save_every", "log_every", "data_parallel_size", "stop_at", "minutes")


@dataclass(frozen=True)
class TrainConfig:
    """Options of `python -m dflash_jax.train`; defaults are the recipe of arXiv 2602.06036, section 5 and A.1.

    Attributes:
        target: folder or Hugging Face Hub id of the target.
        data: folders of `dflash_jax.train.data`, or JSONL files.
        out: folder the drafter is written to; checkpoints and logs lie in `training/` there.
        draft_model: drafter to start from; its configuration is used in place of these options.
        num_hidden_layers: layers of the drafter.
        layer_types: "full_attention" or "sliding_attention" for each layer; None makes the last full and the others
            slide.
        sliding_window: W of sliding layers, tokens.
        block_size: G: the anchor and the tokens drafted in one pass.
        target_layer_ids: capture layers of the target; None spreads as many as the drafter has layers.
        mask_token_id: None takes the tokenizer's mask token, or else the last row of the embedding.
        intermediate_size: F; None takes the target's, as for the other sizes.
        loss: "decay" (fixed weights of positions) or "dpace" (weights by confidence).
        gamma: decay of the weights of "decay"; None takes 7, 5 and 4 for blocks of 16, 10 and 8.
        dpace_alpha: smoothing of the confidence of "dpace", 0 to 1.
        num_anchors: blocks in a sequence of max_length tokens, fewer in shorter ones; drawn anew in each epoch.
        max_length: tokens of a sequence; longer ones are cut.
        batch_tokens: tokens of a step, padding included.
        epochs: passes over the data.
        minutes: time to run in place of epochs: it covers imports, loading, compilation, training and the evaluations,
            the last included; the step that is running is finished, and the drafter is written after it. The learning
            rate falls with time.
        optimizer: "adamw", or "muon", which learns more from each step.
        learning_rate: its peak.
        min_learning_rate: at the end, as a share of the peak.
        warmup_ratio: share of the steps in which the learning rate rises.
        weight_decay: decay of matrices.
        max_grad_norm: bound on the norm of the gradient.
        dtype: to compute in; weights and optimizer are float32.
        feature_cache: folder to keep the target's features in; None computes them in every step.
        data_parallel_size: devices that split the batch.
        tensor_parallel_size: devices that split each weight.
        seed: decides initial weights, order of the data and anchors.
        stop_at: steps after which to stop as if interrupted; None runs to the end.
        log_every: steps between lines of the log.
        save_every: steps between checkpoints.
        eval_every: steps between measurements of the acceptance length by the engine; 0 measures at the end only.
        eval_samples: samples held out of training to measure with; 0 measures nothing, None takes a tenth of the data,
            at most 64.
        eval_max_tokens: tokens generated for each.
    """

    target: str
    data: tuple[str, ...]
    out: str
    draft_model: str | None = None
    num_hidden_layers: int = 5
    layer_types: tuple[str, ...] | None = None
    sliding_window: int = 2048
    block_size: int = 16
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    intermediate_size: int | None = None
    loss: Loss = "decay"
    gamma: float | None = None
    dpace_alpha: float = 0.5
    num_anchors: int = 512
    max_length: int = 3072
    batch_tokens: int = 3072 * 4
    epochs: int = 6
    minutes: float | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 6e-4
    min_learning_rate: float = 0.0
    warmup_ratio: float = 0.04
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    dtype: str = "bfloat16"
    feature_cache: str | None = None
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    seed: int = 0
    stop_at: int | None = None
    log_every: int = 10
    save_every: int = 500
    eval_every: int = 500
    eval_samples: int | None = None
    eval_max_tokens: int = 128

    def __post_init__(self) -> None:
        """Check values that need no file.

        Raises:
            ConfigError: a value is impossible.
        """
        positive = (
            "num_hidden_layers sliding_window num_anchors max_length batch_tokens epochs learning_rate max_grad_norm "
            "data_parallel_size tensor_parallel_size log_every save_every eval_max_tokens"
        )
        for name in (*positive.split(), *(["minutes"] if self.minutes is not None else [])):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be positive.")
        for name in ("weight_decay", "eval_every", "eval_samples", "seed"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name}={value} must be at least 0.")
        for name in ("min_learning_rate", "warmup_ratio", "dpace_alpha"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} must lie between 0 and 1.")
        if self.loss not in ("decay", "dpace"):
            raise ConfigError(f"loss={self.loss!r} is unknown; use 'decay' or 'dpace'.")
        if self.optimizer not in ("adamw", "muon"):
            raise ConfigError(f"optimizer={self.optimizer!r} is unknown; use 'adamw' or 'muon'.")
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype={self.dtype!r} is unknown; use 'float32' or 'bfloat16'.")
        if not self.data:
            raise ConfigError("data names nothing to train on; give a folder of python -m dflash_jax.train.data.")
        if self.max_length < 2 * self.block_size:
            raise ConfigError(
                f"max_length={self.max_length} holds no context and block of {self.block_size}; raise it to at least "
                f"{2 * self.block_size}."
            )
        if self.batch_tokens < self.max_length * self.data_parallel_size:
            raise ConfigError(
                f"batch_tokens={self.batch_tokens} holds fewer than {self.data_parallel_size} sequences of "
                f"max_length={self.max_length}; raise it or lower max_length."
            )

    @property
    def decay(self) -> float:
        """Gamma; defaults are the values of the paper."""
        return self.gamma if self.gamma is not None else {8: 4.0, 10: 5.0}.get(self.block_size, 7.0)

    @property
    def identity(self) -> dict[str, Any]:
        """Options that a resumed run must have in common with the run that began."""
        return {name: value for name, value in asdict(self).items() if name not in FREE and name != "out"}


def draft_config_of(config: TrainConfig, target: TargetConfig, mask_token_id: int) -> DraftConfig:
    """The configuration of the drafter to train: sizes of the target, plain RoPE, norms of queries and keys.

    Args:
        config: options of the run.
        target: its configuration.
        mask_token_id: as `mask_token_of` finds it.

    Raises:
        ConfigError: layer types or capture layers do not fit.
    """
    layers = config.num_hidden_layers
    types = config.layer_types or ("sliding_attention",) * (layers - 1) + ("full_attention",)
    taps = config.target_layer_ids or default_target_layer_ids(target.num_hidden_layers, layers)
    raw = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": layers,
        "layer_types": list(types),
        "use_sliding_window": "sliding_attention" in types,
        "sliding_window": config.sliding_window,
        "block_size": config.block_size,
        "dflash_config": {"target_layer_ids": list(taps), "mask_token_id": mask_token_id},
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": config.intermediate_size or target.intermediate_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "max_position_embeddings": target.max_position_embeddings,
        "dtype": "bfloat16",
    }
    return draft_config(raw, "the drafter asked for")


def options_of(raw: dict[str, Any], where: str | Path) -> dict[str, Any]:
    """Options of a preset, by name, in the types of `TrainConfig`; lists become tuples.

    Args:
        raw: the preset; names may have hyphens in place of underscores.
        where: names the preset in errors.

    Raises:
        ConfigError: an option is unknown, or its value is of another type.
    """
    known = option_kinds()
    options = {str(name).replace("-", "_"): value for name, value in raw.items()}
    for name in options:
        if name not in known:
            raise ConfigError(f"{where}: there is no option {name!r}; known are {', '.join(sorted(known))}.")
    return {name: _converted(known[name], value, f"{where}: {name}={value!r}") for name, value in options.items()}


def option_kinds() -> dict[str, OptionKind]:
    """The kind of each option, by name."""
    return {name: OptionKind.of(hint) for name, hint in get_type_hints(TrainConfig).items()}


class OptionKind(NamedTuple):
    """What an option holds.

    Attributes:
        type: `int`, `float` or `str`; of a list, of its elements.
        is_list: whether it holds several.
        is_optional: whether it may be None.
    """

    type: type
    is_list: bool
    is_optional: bool

    @staticmethod
    def of(hint: Any) -> OptionKind:
        """The kind that a type annotation of `TrainConfig` says."""
        is_optional = get_origin(hint) in (Union, UnionType)
        kind = next(part for part in get_args(hint) if part is not NoneType) if is_optional else hint
        is_list = get_origin(kind) is tuple
        element = get_args(kind)[0] if is_list else kind
        return OptionKind(str if get_origin(element) is Literal else element, is_list, is_optional)


def _converted(kind: OptionKind, value: Any, what: str) -> Any:
    """A value of a YAML file as its option holds it; YAML reads `1e-3`, which has no dot, as a string.

    Raises:
        ConfigError: it is of another type.
    """
    if value is None and kind.is_optional:
        return None
    if kind.is_list:
        element = kind._replace(is_list=False, is_optional=False)
        return tuple(_converted(element, item, what) for item in (value if isinstance(value, list) else [value]))
    if kind.type is float:
        with contextlib.suppress(TypeError, ValueError):
            if not isinstance(value, bool) and math.isfinite(number := float(value)):
                return number
    elif isinstance(value, kind.type) and not isinstance(value, bool):
        return value
    names = {int: "an integer", float: "a number", str: "a text"}
    raise ConfigError(f"{what} must be {names[kind.type]}; correct the value.")
