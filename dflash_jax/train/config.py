"""The options of a training run: read from flags and a preset in `configs/train/`, kept with the checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dflash_jax.base.errors import ConfigError
from dflash_jax.options.kinds import Choice, Number, Text
from dflash_jax.options.option import check_options, described, documented, option
from dflash_jax.spec import DraftConfig, TargetConfig
from dflash_jax.spec.draft import default_target_layer_ids, draft_config

MASK_TOKENS = ("<|mask|>", "<|MASK|>", "[MASK]", "<mask>")
# Options that a run may change when it goes on: they change neither what was trained nor what is held out of training.
FREE = ("eval_every", "eval_max_tokens", "save_every", "log_every", "data_parallel_size", "stop_at", "minutes")

LAYER_TYPES = ("full_attention", "sliding_attention")
SIZE, SIZE_OR_NONE, COUNT, COUNT_OR_NONE = Number(1), Number(1, or_none=True), Number(0), Number(0, or_none=True)
SHARE, POSITIVE = Number(0, 1, is_whole=False), Number(0, is_whole=False, is_open=True)


@documented
@dataclass(frozen=True)
class TrainConfig:
    """Options of `python -m dflash_jax.train`; defaults are the recipe of arXiv 2602.06036, section 5 and A.1."""

    target: str = field(metadata=described(Text(), "folder or Hugging Face Hub id of the target", unit="MODEL"))
    data: tuple[str, ...] = field(
        metadata=described(
            Text(), "folders made by dflash_jax.train.data, or JSONL files", unit="FOLDER|FILE", nargs="+"
        )
    )
    out: str = field(
        metadata=described(
            Text(), "folder of the drafter; checkpoints and logs are written to training/ there", unit="FOLDER"
        )
    )
    draft_model: str | None = option(
        None, Text(or_none=True), "drafter to go on from, whose configuration the new one then has", unit="MODEL"
    )
    num_hidden_layers: int = option(5, SIZE, "layers of the drafter", unit="LAYERS")
    layer_types: tuple[str, ...] | None = option(
        None,
        Choice(LAYER_TYPES, or_none=True),
        "full_attention or sliding_attention, for each layer of the drafter",
        unit="TYPE",
        unset="the last is full, the others slide",
        nargs="+",
    )
    sliding_window: int = option(2048, SIZE, "W, the window of sliding layers", unit="TOKENS")
    block_size: int = option(16, SIZE, "G, the tokens of a block: anchor and drafts", unit="TOKENS")
    target_layer_ids: tuple[int, ...] | None = option(
        None,
        Number(or_none=True),
        "target layers whose features the drafter reads (its capture layers)",
        unit="LAYER",
        unset="as many as the drafter has layers, spread evenly",
        nargs="+",
    )
    mask_token_id: int | None = option(
        None,
        Number(0, or_none=True),
        "token that stands for a position to draft",
        unit="ID",
        unset="the tokenizer's mask token, or else the last row of the embedding",
    )
    intermediate_size: int | None = option(
        None, SIZE_OR_NONE, "F, the width of the drafter's MLP", unit="WIDTH", unset="the target's, as other sizes are"
    )
    loss: Literal["decay", "dpace"] = option(
        "decay",
        Choice(("decay", "dpace")),
        "decay weighs positions by a fixed curve, dpace by the drafter's confidence",
        unit="decay|dpace",
    )
    gamma: float | None = option(
        None,
        Number(0, is_whole=False, is_open=True, or_none=True),
        "decay of the loss decay, in positions",
        unit="GAMMA",
        unset="7, 5 and 4 for blocks of 16, 10 and 8",
    )
    dpace_alpha: float = option(0.5, SHARE, "alpha of the loss dpace", unit="ALPHA")
    num_anchors: int = option(
        512,
        SIZE,
        "blocks in a sequence of max_length tokens, fewer in shorter ones; drawn anew in each epoch",
        unit="BLOCKS",
    )
    max_length: int = option(3072, SIZE, "most tokens of a sequence; longer ones are cut", unit="TOKENS")
    batch_tokens: int = option(3072 * 4, SIZE, "tokens of a step, padding included", unit="TOKENS")
    epochs: int = option(6, SIZE, "passes over the data", unit="N")
    minutes: float | None = option(
        None,
        Number(0, is_whole=False, is_open=True, or_none=True),
        "train this long, start, loading and compilation included, not for epochs; the learning rate falls with time",
        unit="MINUTES",
    )
    optimizer: Literal["adamw", "muon"] = option(
        "adamw", Choice(("adamw", "muon")), "adamw, or muon, which learns more from each step", unit="adamw|muon"
    )
    learning_rate: float = option(6e-4, POSITIVE, "highest learning rate", unit="RATE")
    min_learning_rate: float = option(0.0, SHARE, "learning rate at the end, as a share of the highest", unit="SHARE")
    warmup_ratio: float = option(0.04, SHARE, "share of the steps in which the learning rate rises", unit="SHARE")
    weight_decay: float = option(0.0, Number(0, is_whole=False), "weight decay of matrices", unit="RATE")
    max_grad_norm: float = option(1.0, POSITIVE, "bound on the gradient's norm", unit="NORM")
    dtype: str = option(
        "bfloat16",
        Choice(("float32", "bfloat16")),
        "type to compute in; weights and optimizer are float32",
        unit="float32|bfloat16",
    )
    feature_cache: str | None = option(
        None,
        Text(or_none=True),
        "folder that keeps the target's features",
        unit="FOLDER",
        unset="none: they are computed in every step",
    )
    data_parallel_size: int = option(1, SIZE, "devices that split the batch", unit="DEVICES")
    tensor_parallel_size: int = option(1, SIZE, "devices that split each weight", unit="DEVICES")
    seed: int = option(0, COUNT, "seed of initial weights, anchors and the order of the data", unit="N")
    stop_at: int | None = option(
        None, COUNT_OR_NONE, "steps after which to stop as if interrupted", unit="STEPS", unset="none: run to the end"
    )
    log_every: int = option(10, SIZE, "steps between lines of the log", unit="STEPS")
    save_every: int = option(500, SIZE, "steps between checkpoints", unit="STEPS")
    eval_every: int = option(
        500,
        COUNT,
        "steps between measurements of the acceptance length by the engine; 0 measures only at the end",
        unit="STEPS",
    )
    eval_samples: int | None = option(
        None,
        COUNT_OR_NONE,
        "samples held out of training for these measurements; 0 measures nothing",
        unit="SAMPLES",
        unset="a tenth of the data, at most 64",
    )
    eval_max_tokens: int = option(128, SIZE, "most tokens generated for each of these samples", unit="TOKENS")

    def __post_init__(self) -> None:
        """Check values that need no file.

        Raises:
            ConfigError: a value is impossible, or two do not go together.
        """
        check_options(self)
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
        """`gamma`, or the paper's value for the block size."""
        return self.gamma if self.gamma is not None else {8: 4.0, 10: 5.0}.get(self.block_size, 7.0)

    @property
    def identity(self) -> dict[str, Any]:
        """The options that a run must keep when it goes on."""
        return {name: value for name, value in asdict(self).items() if name not in FREE and name != "out"}


def draft_config_of(config: TrainConfig, target: TargetConfig, mask_token_id: int) -> DraftConfig:
    """The configuration of a new drafter: the target's sizes, plain RoPE, and norms of queries and keys.

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
        # Published drafters of targets without dense layers are three times as wide as the model.
        "intermediate_size": config.intermediate_size or target.intermediate_size or 3 * target.hidden_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "max_position_embeddings": target.max_position_embeddings,
        "dtype": "bfloat16",
    }
    return draft_config(raw, "the drafter asked for")
