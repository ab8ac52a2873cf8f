"""Resolve a model's name, Hub id or path to a local folder."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

from dflash_jax.base.env import cache_folder
from dflash_jax.base.errors import CheckpointError

# Files that are downloaded: weights and text, never code.
WANTED_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")

# Models that scripts/get_<alias>.py makes: folder names, in the cache and, for a drafter that ships, in DRAFTERS.
ALIASES = {"smollm2": "smollm2-135m-instruct"}
EMBEDDED = Path(__file__).parents[1] / "embedded"  # the pair that stands where no model is named
PAIRS = {  # that ship with the package
    "embedded": EMBEDDED,
    "embedded-hybrid": Path(__file__).parents[1] / "embedded_hybrid",
}
DRAFTERS = Path(__file__).parents[1] / "drafters"


def resolve_folders(model: str | Path | None, draft_model: str | Path | None) -> tuple[Path, Path | None]:
    """The folders of target and drafter.

    Without a model they are the embedded pair's; a name without a drafter gets the one that ships for it, if any.

    Raises:
        CheckpointError: one is neither a folder nor a repository that can be reached.
    """
    if model is None:
        model, draft_model = EMBEDDED / "target", draft_model or EMBEDDED / "draft"
    elif draft_model is None:
        draft_model = alias_drafter(model)
    return resolve_folder(model), None if draft_model is None else resolve_folder(draft_model)


def resolve_folder(model: str | Path) -> Path:
    """The folder of a model, which is given as a path, by a name of ours or as a Hugging Face Hub id.

    Raises:
        CheckpointError: it is neither a folder nor a repository that can be reached, or the alias was not made yet.
    """
    if not isinstance(model, str | Path) or not str(model):
        raise CheckpointError(f"{model!r} is no model; give a model folder or a Hub id such as 'Qwen/Qwen3-8B'.")
    if isinstance(model, str) and model in PAIRS:
        return PAIRS[model] / "target"
    if isinstance(model, str) and model in ALIASES:
        return _made_folder(model)
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


def alias_folder(alias: str) -> Path:
    """The folder of an alias's model, which may not exist yet."""
    return cache_folder() / ALIASES[alias]


def alias_drafter(model: str | Path) -> Path | None:
    """The folder of the drafter that ships for a name of ours; None if none ships, or the model is not named so."""
    if isinstance(model, str) and model in PAIRS:
        return PAIRS[model] / "draft"
    if not isinstance(model, str) or model not in ALIASES:
        return None
    folder = DRAFTERS / ALIASES[model]
    return folder if folder.is_dir() else None


def _made_folder(alias: str) -> Path:
    folder = alias_folder(alias)
    if not folder.is_dir():
        raise CheckpointError(
            f"{alias!r} is not in {folder} yet; make it once with `python scripts/get_{alias}.py` from a clone of the "
            "repository."
        )
    return folder
