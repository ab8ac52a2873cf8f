"""The target and the drafter of a run: read from their folders, and the drafter written to one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from dflash_jax.base.errors import ConfigError
from dflash_jax.progress import announce, phase
from dflash_jax.spec import DraftConfig, TargetConfig, check_draft_fits
from dflash_jax.text.tokenizer import Tokenizer
from dflash_jax.train.config import MASK_TOKENS, TrainConfig, draft_config_of
from dflash_jax.train.state import place
from dflash_jax.weights.drafter import read_draft_config
from dflash_jax.weights.export import draft_raw_config, save_model
from dflash_jax.weights.folder import resolve_folder
from dflash_jax.weights.loader import Params, load_params
from dflash_jax.weights.target import read_target_config


@dataclass(frozen=True)
class Pair:
    """A target with its parameters, and the drafter to train for it.

    Attributes:
        folder: the target's.
        target: its configuration.
        params: its parameters, in the dtype to compute in.
        draft: configuration of the drafter.
        draft_params: float32 parameters to start from; None starts from random ones.
    """

    folder: Path
    target: TargetConfig
    params: Params
    draft: DraftConfig
    draft_params: Params | None


def load_pair(config: TrainConfig, mesh: jax.sharding.Mesh) -> Pair:
    """Load the target in the dtype to compute in, split over `tp`, and what there is of the drafter.

    Raises:
        ConfigError: a configuration does not fit.
        CheckpointError: a folder, file or tensor is missing, damaged or surplus.
    """
    announce("finding the models")
    folder = resolve_folder(config.target)
    draft_folder = None if config.draft_model is None else resolve_folder(config.draft_model)
    with phase("loading the models"):
        return _load_pair(config, mesh, folder, draft_folder)


def _load_pair(config: TrainConfig, mesh: jax.sharding.Mesh, folder: Path, draft_folder: Path | None) -> Pair:
    path, target = folder / "config.json", read_target_config(folder)

    def where(axes: tuple[str, ...], shape: tuple[int, ...]) -> jax.sharding.Sharding:
        return place(mesh, axes, shape)

    draft_params = None
    if draft_folder is None:
        draft = draft_config_of(config, target, mask_token_of(config, target, folder))
        check_draft_fits(target, draft, str(path))
    else:
        path = draft_folder / "config.json"
        draft = read_draft_config(draft_folder, target)
        draft_params = load_params(draft_folder, draft, jnp.float32, where)
    if draft.draft_vocab_size is not None:
        raise ConfigError(
            f"{path}: draft_vocab_size={draft.draft_vocab_size}, and heads of drafters are not trained here; use a "
            "drafter that shares its target's head."
        )
    return Pair(folder, target, load_params(folder, target, jnp.dtype(config.dtype), where), draft, draft_params)


def mask_token_of(config: TrainConfig, target: TargetConfig, folder: Path) -> int:
    """The token whose embedding fills the rows of a block behind the anchor.

    The option if it is set, else the tokenizer's mask token, else the last row of the embedding.
    """
    if config.mask_token_id is not None:
        return config.mask_token_id
    tokenizer = Tokenizer.of(folder)
    if tokenizer is not None:
        known = (tokenizer.token_id(name) for name in MASK_TOKENS)
        return next((token for token in known if token is not None), target.vocab_size - 1)
    return target.vocab_size - 1


def write_draft(folder: Path, pair: Pair, params: Params) -> None:
    """Write the drafter to a folder that `LLM`, vLLM and the reference implementation load; weights are bfloat16."""
    raw = draft_raw_config(
        pair.draft, pair.target.num_hidden_layers, max_position_embeddings=pair.target.max_position_embeddings
    )
    save_model(folder, raw, pair.draft, jax.device_get(params), "bfloat16")
