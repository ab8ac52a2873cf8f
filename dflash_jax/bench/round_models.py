"""Models of `bench round`: exact shapes of published models, by name, with random weights made on the devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from dflash_jax.base.errors import ConfigError
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import DraftConfig, TargetConfig, draft_config, target_config
from dflash_jax.spec.draft import check_draft_fits, default_target_layer_ids
from dflash_jax.spec.fields import read_json
from dflash_jax.spec.hybrid import ARCHITECTURES as HYBRIDS
from dflash_jax.spec.hybrid import text_raw_config
from dflash_jax.weights.drafter import read_draft_config
from dflash_jax.weights.formats.grouped import Grouped
from dflash_jax.weights.initial import initializer
from dflash_jax.weights.loader import Params
from dflash_jax.weights.parameters import PROJECTIONS, Parameter, build, output_axes, parameters_of
from dflash_jax.weights.quantized import placed
from dflash_jax.weights.tables import checkpoint_table

DRAFT_BLOCK = 16  # of all drafters that z-lab publishes
GROUP = 128  # inputs that share a scale in published checkpoints


@dataclass(frozen=True)
class Generation:
    """What drafters that were published together have in common.

    Attributes:
        layers: of the drafter.
        taps: captured layers of the target, spread evenly.
        mask_token_id: the token that stands for a position to draft.
        sliding_window: W of all layers but the last, which is full; None makes all layers full.
    """

    layers: int
    taps: int
    mask_token_id: int
    sliding_window: int | None = None


# Sources: the config.json of Qwen3-4B-DFlash-b16 and Qwen3-8B-DFlash-b16, of Qwen3.6-27B-DFlash, and of what came after
# June 2026 (Qwen3.5-122B-A10B-DFlash). That of Qwen3.5-9B-DFlash was not read; its 1.3 billion parameters fit the last.
QWEN3 = Generation(layers=5, taps=5, mask_token_id=151_669)
QWEN3_5 = Generation(layers=5, taps=5, mask_token_id=248_070, sliding_window=2048)
QWEN3_5_RETRAINED = Generation(layers=6, taps=8, mask_token_id=248_077, sliding_window=4096)


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


def qwen3_5(
    hidden_size: int, intermediate_size: int, layers: int, heads: tuple[int, int], value_heads: int, *, tied: bool
) -> dict[str, Any]:
    """The fields of the language model of a dense Qwen3.5 or Qwen3.6: three layers of four have Gated DeltaNet.

    Args:
        hidden_size: D.
        intermediate_size: F.
        layers: L.
        heads: N and K, of the attention.
        value_heads: HV.
        tied: whether the head is the embedding.
    """
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 248_320,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }


def experts(count: int, per_token: int, width: int, *, is_shared: bool) -> dict[str, Any]:
    """The fields of a mixture of experts; the shared expert, if there is one, is as wide as the others."""
    fields = {"num_experts": count, "num_experts_per_tok": per_token, "moe_intermediate_size": width}
    return fields | ({"shared_expert_intermediate_size": width} if is_shared else {"norm_topk_prob": True})


def qwen3_5_moe(
    hidden_size: int, layers: int, heads: tuple[int, int], value_heads: int, expert_width: int
) -> dict[str, Any]:
    """The fields of a Qwen3.5 or Qwen3.6 with 256 experts, 8 a token; arguments as for `qwen3_5`."""
    dense = qwen3_5(hidden_size, 0, layers, heads, value_heads, tied=False)
    del dense["intermediate_size"]
    sparse = experts(256, 8, expert_width, is_shared=True)
    return dense | {"architectures": ["Qwen3_5MoeForCausalLM"]} | sparse


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
    "qwen3.5-0.8b": qwen3_5(1024, 3584, 24, (8, 2), 16, tied=True),
    "qwen3.5-4b": qwen3_5(2560, 9216, 32, (16, 4), 32, tied=True),
    "qwen3.5-9b": qwen3_5(4096, 12_288, 32, (16, 4), 32, tied=False),
    "qwen3.6-27b": qwen3_5(5120, 17_408, 64, (24, 4), 48, tied=False),
    "qwen3-30b-a3b": qwen3(2048, 6144, 48, 32, tied=False)
    | {"architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 4}
    | experts(128, 8, 768, is_shared=False),
    "qwen3-next-80b-a3b": qwen3_5_moe(2048, 48, (16, 2), 32, 512)
    | {"architectures": ["Qwen3NextForCausalLM"], "vocab_size": 151_936}
    | experts(512, 10, 512, is_shared=True),
    "qwen3.5-35b-a3b": qwen3_5_moe(2048, 40, (16, 2), 32, 512),
    "qwen3.5-122b-a10b": qwen3_5_moe(3072, 48, (32, 2), 64, 1024),
    "tiny-moe": TINY | {"architectures": ["Qwen3MoeForCausalLM"]} | experts(8, 2, 32, is_shared=False),
    "tiny": TINY,  # these two are to try the command on a CPU
}


RETRAINED = ("qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-9b", "qwen3.5-35b-a3b", "qwen3.5-122b-a10b")
GENERATIONS = dict.fromkeys(RETRAINED, QWEN3_5_RETRAINED)


DRAFT_FIELDS = (  # those of the target that each drafter has, too
    *("vocab_size", "hidden_size"),
    *("rms_norm_eps", "max_position_embeddings", "dtype", "torch_dtype"),
)
QWEN3_FIELDS = (
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
)


def drafter_of(
    target: Mapping[str, Any], generation: Generation | None = None, *, sliding_window: int | None = None
) -> dict[str, Any]:
    """The `config.json` of a drafter as z-lab publishes them.

    Args:
        target: `config.json` of the target. A drafter of a dense Qwen3 has its heads, one of a hybrid has heads of its
            own: 32 for queries and 8 for keys and values, of size 128.
        generation: what else it has; None chooses `QWEN3` or `QWEN3_5`.
        sliding_window: W of all layers but the last; None is that of the generation.
    """
    text = text_raw_config(target)
    is_hybrid = target["architectures"][0] in HYBRIDS
    generation = generation or (QWEN3_5 if is_hybrid else QWEN3)
    window, deep = sliding_window or generation.sliding_window, text["num_hidden_layers"]
    is_large = text["vocab_size"] > generation.mask_token_id
    layers = min(generation.layers, deep // 2)
    taps = generation.taps if layers == generation.layers else layers
    raw: dict[str, Any] = {name: text[name] for name in DRAFT_FIELDS if name in text} | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": layers,
        "num_target_layers": deep,
        "block_size": DRAFT_BLOCK if is_large else DRAFT_BLOCK // 4,
        "dflash_config": {
            "mask_token_id": generation.mask_token_id if is_large else text["vocab_size"] - 1,
            "target_layer_ids": list(default_target_layer_ids(deep, taps)),
        },
        "intermediate_size": text.get("intermediate_size", 3 * text["hidden_size"]),  # those of targets with experts
    }
    if is_hybrid:
        raw |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        raw["rope_theta"] = target_config(target).rope.theta
    else:
        raw |= {name: text[name] for name in QWEN3_FIELDS if name in text}
    if window is None:
        return raw
    kinds = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    return raw | {"layer_types": kinds, "use_sliding_window": True, "sliding_window": window}


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
        draft_raw = drafter_of(raw, GENERATIONS.get(model), sliding_window=sliding_window)
        draft = draft_config(draft_raw, draft_where)
        check_draft_fits(target, draft, draft_where)
        return target, draft
    return target, read_draft_config(Path(draft_model), target)


def random_params(
    config: TargetConfig | DraftConfig, dtype: DTypeLike, mesh: Mesh, seed: int, quantization: str | None = None
) -> Params:
    """Random weights made on their devices, from the distributions of a new model (`weights.initial`).

    Args:
        config: the model's.
        dtype: of the arrays.
        mesh: the devices.
        seed: of the random numbers.
        quantization: one of `TARGET_QUANTIZATIONS` for matrices; heads and gates of the state have the dtype all the
            same, as in published checkpoints.
    """
    keys = itertools.count()
    programs: dict[tuple[str, tuple[int, ...]], Callable[[jax.Array], jax.Array | Grouped]] = {}

    def make(parameter: Parameter) -> jax.Array | Grouped:
        name, shape = parameter.path[-1], parameter.shape
        if (name, shape) not in programs:  # compiled once for all layers
            place = mesh.place(parameter.axes, shape)
            if quantization is not None and name in PROJECTIONS and name != "in_proj_ba":
                rows = output_axes(parameter.axes)
                sharding, devices = placed(place, rows)
                group = math.gcd(GROUP, math.prod(shape[rows:]) // devices)
                stored = jnp.uint16
                if quantization == "fp8":
                    stored = jnp.int16 if parameter.is_experts else jnp.float8_e4m3fn
                fill = partial(_random_bits, shape=shape, rows=rows, group=group, dtype=stored)
                programs[name, shape] = jax.jit(fill, out_shardings=sharding)
            else:
                stored = jnp.int32 if name == "d2t" else jnp.float32 if parameter.is_float32 else dtype
                plain = partial(initializer(name), shape=shape, dtype=stored)
                programs[name, shape] = jax.jit(plain, out_shardings=place)
        return programs[name, shape](jax.random.fold_in(jax.random.key(seed), next(keys)))

    params: Params = build(parameters_of(checkpoint_table(config), config), make)
    return jax.block_until_ready(params)


def _random_bits(key: jax.Array, *, shape: tuple[int, ...], rows: int, group: int, dtype: DTypeLike) -> Grouped:
    """A weight [*O, *I] of random bits, with scales that give its numbers a deviation of about 0.02.

    Its numbers have 4 bits in uint16, four to a word; they are in e4m3 in int16, two to a word, and in float8_e4m3fn.
    """
    inputs, is_fp8 = math.prod(shape[rows:]), dtype != jnp.uint16
    length = inputs if dtype == jnp.float8_e4m3fn else inputs // (2 if is_fp8 else 4)
    words = jax.random.bits(key, (*shape[:rows], length), jnp.uint8 if length == inputs else jnp.uint16)
    scale = 0.02 / (64 if is_fp8 else 4)  # of e4m3 numbers up to 240, and of numbers from -8 to 7
    scales = jnp.full((*shape[:rows], inputs // group), scale, jnp.bfloat16)
    if is_fp8:  # without NaN: a bit of each exponent is 0
        words = lax.bitcast_convert_type(words & (0xF7 if length == inputs else 0xFF77), dtype)
    return Grouped(words, scales, inner=shape[rows + 1 :])
