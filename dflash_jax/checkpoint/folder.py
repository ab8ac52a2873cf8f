"""From what a user calls a model to a local folder."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

from dflash_jax.errors import CheckpointError

# Weights and texts; never code.
WANTED_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")


def resolve_folder(model: str | Path) -> Path:
    """The folder of a model: the path itself, or a snapshot of a Hugging Face Hub id.

    Raises:
        CheckpointError: it is neither a folder nor a repository that can be reached.
    """
    if not isinstance(model, str | Path) or not str(model):
        raise CheckpointError(f"{model!r} is no model; give a model folder or a Hub id such as 'Qwen/Qwen3-8B'.")
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or str(model).count("/") != 1 or str(model).startswith((".", "/", "~")):
        raise CheckpointError(f"{model} is not a folder; give a model folder or a Hub id such as 'Qwen/Qwen3-8B'.")
    try:
        return Path(snapshot_download(str(model), allow_patterns=list(WANTED_FILES)))
    except (HFValidationError, HfHubHTTPError, HTTPError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{model!r} is not a local folder and could not be fetched from the Hugging Face Hub ({reason}); "
            "check the name and the network, or give a local folder."
        ) from error
