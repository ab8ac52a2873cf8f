"""The configuration of a drafter, read from its folder and checked against its weights and its target."""

from __future__ import annotations

from pathlib import Path

from dflash_jax.base.errors import CheckpointError
from dflash_jax.spec import DraftConfig, TargetConfig, check_draft_fits, draft_config, read_json
from dflash_jax.weights.safetensors import list_tensors


def read_draft_config(folder: Path, target: TargetConfig) -> DraftConfig:
    """Read the `config.json` of a drafter for a target.

    The number of capture layers is what the weight `fc` takes; a folder without weights is believed.

    Raises:
        CheckpointError: a file is absent or damaged.
        ConfigError: a bad configuration, or one that fits neither `fc` nor the target.
    """
    path = folder / "config.json"
    draft = draft_config(
        read_json(path), str(path), num_target_layers=target.num_hidden_layers, fc_inputs=fc_inputs(folder)
    )
    check_draft_fits(target, draft, str(path))
    return draft


def fc_inputs(folder: Path) -> int | None:
    """Columns of a drafter's projection of the captured features; None if the folder has no such weight.

    Raises:
        CheckpointError: a file of weights is damaged.
    """
    if not any(folder.glob("*.safetensors")):
        return None
    fc = list_tensors(folder).get("fc.weight")
    if fc is None:
        return None
    if len(fc.shape) != 2:
        raise CheckpointError(
            f"{fc.file}: tensor 'fc.weight' of shape {list(fc.shape)} is no matrix; download it again."
        )
    return fc.shape[1]
