"""Models of `bench round`: exact shapes of published models, by name, with random weights made on the devices."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dflash_jax.base.errors import ConfigError
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import DraftConfig, TargetConfig, draft_config, target_config
from dflash_jax.spec.draft import check_draft_fits, default_target_layer_ids
from dflash_jax.spec.fields import read_json
from dflash_jax.weights.drafter import read_draft_config
from dflash_jax.weights.initial import initializer
from dflash_jax.weights.loader import Params
from dflash_jax.weights.tables import Parameter, build, checkpoint_table, parameters_of

DRAFT_LAYERS, DRAFT_BLOCK, DRAFT_MASK = 5, 16, 151_669  # those of z-lab's Qwen3-4B-DFlash-b16 and Qwen3-8B-DFlash-b16


def qwen3(hidden_size: int, intermediate_size: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    """The fields of the `config.json` of a dense Qwen3 on which shapes and arithmetic depend."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }


TINY = qwen3(64, 128, 4, 4, tied=False) | {
    "vocab_size": 512,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "dtype": "float32",
}
PRESETS = {
    "qwen3-0.6b": qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": qwen3(4096, 12_288, 36, 32, tied=False),
    "qwen3-14b": qwen3(5120, 17_408, 40, 40, tied=False),
    "qwen3-32b": qwen3(5120, 25_600, 64, 64, tied=False),
    "tiny": TINY,  # to try the command on a CPU
}


def drafter_of(target: dict[str, Any], *, sliding_window: int | None = None) -> dict[str, Any]:
    """The `config.json` of a drafter as z-lab publishes them: layers of the target's shapes with full attention.

    Args:
        target: `config.json` of the target.
        sliding_window: W of all layers but the last; None makes all layers full.
    """
    is_large = target["vocab_size"] > DRAFT_MASK
    layers = min(DRAFT_LAYERS, target["num_hidden_layers"] // 2)
    raw = target | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": layers,
        "num_target_layers": target["num_hidden_layers"],
        "block_size": DRAFT_BLOCK if is_large else DRAFT_BLOCK // 4,
        "dflash_config": {
            "mask_token_id": DRAFT_MASK if is_large else target["vocab_size"] - 1,
            "target_layer_ids": list(default_target_layer_ids(target["num_hidden_layers"], layers)),
        },
    }
    if sliding_window is None:
        return raw
    kinds = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    return raw | {"layer_types": kinds, "use_sliding_window": True, "sliding_window": sliding_window}


def configs_of(
    model: str, draft_model: str | None, *, sliding_window: int | None = None
) -> tuple[TargetConfig, DraftConfig]:
    """Configurations of target and drafter, of a preset or of folders with a `config.json`.

    Args:
        model: a name in `PRESETS`, or a folder.
        draft_model: a folder; None takes `drafter_of` the target.
        sliding_window: of that drafter.

    Raises:
        ConfigError: there is no such preset or folder, or its configuration is wrong.
        CheckpointError: a `config.json` cannot be read.
    """
    if model in PRESETS:
        raw, where = PRESETS[model], model
    elif Path(model).is_dir():
        where = str(Path(model) / "config.json")
        raw = read_json(Path(where))
    else:
        raise ConfigError(f"--model {model} is neither a folder nor one of {', '.join(PRESETS)}.")
    if draft_model is not None and sliding_window is not None:
        raise ConfigError(
            f"--draft-sliding-window {sliding_window} is for the default drafter; leave it out with --draft-model."
        )
    target, draft_where = target_config(raw, where), f"the drafter of {model}"
    if draft_model is None:
        draft = draft_config(drafter_of(raw, sliding_window=sliding_window), draft_where)
        check_draft_fits(target, draft, draft_where)
        return target, draft
    return target, read_draft_config(Path(draft_model), target)


def random_params(config: TargetConfig | DraftConfig, dtype: DTypeLike, mesh: Mesh, seed: int) -> Params:
    """Random weights made on their devices: norms are one, matrices come from N(0, 0.02)."""
    keys = itertools.count()
    programs: dict[tuple[str, tuple[int, ...]], Callable[[jax.Array], jax.Array]] = {}

    def make(parameter: Parameter) -> jax.Array:
        name, shape = parameter.path[-1], parameter.shape
        if (name, shape) not in programs:  # compiled once for all layers
            stored = jnp.int32 if name == "d2t" else jnp.float32 if parameter.is_float32 else dtype
            fill = partial(initializer(name), shape=shape, dtype=stored)
            programs[name, shape] = jax.jit(fill, out_shardings=mesh.place(parameter.axes, shape))
        return programs[name, shape](jax.random.fold_in(jax.random.key(seed), next(keys)))

    params: Params = build(parameters_of(checkpoint_table(config), config), make)
    return jax.block_until_ready(params)
