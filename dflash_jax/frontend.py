"""Loads models, and turns users' prompts, chats and sampling parameters into requests of an engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_jax.base.env import claim_device_memory
from dflash_jax.base.errors import ConfigError
from dflash_jax.base.outputs import CompletionOutput
from dflash_jax.base.values import SEED_LIMIT, Prompt, SamplingParams, is_int
from dflash_jax.engine.device.budget import (
    check_machine_memory,
    device_bytes,
    fitted,
    parameter_bytes,
    with_draft_quantization,
)
from dflash_jax.engine.device.memory import explain_out_of_memory
from dflash_jax.engine.device.model import Model, narrowed, quantized, screened
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.host.constraints import Constraints
from dflash_jax.engine.host.request import Request, cache_salt_of, check_params, tokenize
from dflash_jax.engine.host.sequence import Sequence
from dflash_jax.options import EngineArgs, EngineConfig
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.parallel.platform import enable_compilation_cache, share_of_gpu
from dflash_jax.spec import DraftConfig, Fields, TargetConfig
from dflash_jax.spec.quantization import quantizes
from dflash_jax.text.renderer import Renderer
from dflash_jax.text.tokenizer import Tokenizer
from dflash_jax.weights.drafter import read_draft_config
from dflash_jax.weights.folder import resolve_folder, resolve_folders
from dflash_jax.weights.layouts import Matrix, rounded, rounded_int4
from dflash_jax.weights.loader import load_kv_scales, load_params
from dflash_jax.weights.target import read_target_config


class Frontend(Renderer):
    """Turns prompts into requests: everything that handles text before the engine.

    Attributes:
        eos_token_ids: every token that ends a text.
        num_tokens: rows of the vocabulary that may be emitted; those behind are padding, which nothing stands for.
    """

    def __init__(self, folder: Path, target: TargetConfig, config: EngineConfig, *, seed: int | None):
        super().__init__(folder)
        self.config, self.vocab_size = config, target.vocab_size
        self.eos_token_ids = _eos_token_ids(self.generation_config, target, self.tokenizer)
        named = self.vocab_size if self.tokenizer is None else self.tokenizer.num_tokens
        self.num_tokens = min(max(named, *(token + 1 for token in self.eos_token_ids), 0), self.vocab_size)
        self._constraints = (
            Constraints(self.tokenizer, target.vocab_size, self.eos_token_ids) if self.tokenizer else None
        )
        self._seeds = random.Random(seed)
        self._request_ids = count()

    def request(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> Request:
        """Check a prompt and its parameters, and make a request of them.

        Raises:
            RequestError: the prompt or its parameters cannot be served.
        """
        text, token_ids = tokenize(prompt, self.tokenizer, vocab_size=self.vocab_size)
        salt = cache_salt_of(prompt)
        max_new_tokens = check_params(
            params,
            prompt_length=len(token_ids),
            max_model_len=self.config.max_model_len,
            vocab_size=self.vocab_size,
            num_tokens=self.num_tokens,
            has_tokenizer=self.tokenizer is not None,
        )
        seed = self._seeds.randrange(SEED_LIMIT) if params.seed is None else params.seed
        number = str(next(self._request_ids))
        sequences: list[Sequence] = []
        for i in range(params.n):
            sequences.append(
                Sequence(
                    prompt_token_ids=token_ids,
                    params=params,
                    seed=(seed + i) % SEED_LIMIT,
                    eos_token_ids=() if params.ignore_eos else self.eos_token_ids,
                    max_new_tokens=max_new_tokens,
                    tokenizer=self.tokenizer if params.detokenize else None,
                    output=CompletionOutput(index=i),
                    constraint=self._constraints.of(params) if self._constraints else None,
                    first=sequences[0] if sequences else None,
                    cache_salt=self._page_salt(salt, number, params.n),
                )
            )
        return Request(request_id or number, text, token_ids, sequences)

    def _page_salt(self, salt: str | None, number: str, n: int) -> bytes | None:
        """Salt of its pages: the prompt's with the prefix cache; without it one of its own if n > 1, else None."""
        if self.config.enable_prefix_caching:
            return (salt or "").encode()
        return None if n == 1 else number.encode()


def load(
    model: str | Path | None,
    draft_model: str | Path | None,
    args: EngineArgs,
    target_params: Mapping[str, Any] | None = None,
) -> tuple[Frontend, Engine]:
    """Load a model and its drafter; `target_params` as for `LLM`.

    Raises:
        ConfigError: an unknown architecture, a drafter that does not fit, or an impossible option.
        CheckpointError: a folder, file or tensor is missing, damaged or surplus.
    """
    if args.seed is not None and not is_int(args.seed):
        raise ConfigError(f"seed={args.seed!r} must be an integer.")
    folder, draft_folder = resolve_folders(model, draft_model)
    target, draft = _read_configs(folder, draft_folder)
    quantize = quantizes(args.quantization, target.quantization, str(folder))
    claim_device_memory(share_of_gpu(args.gpu_memory_bytes))
    enable_compilation_cache()
    config = EngineConfig.of(args, target, draft, on_cpu=jax.default_backend() == "cpu")
    frontend = Frontend(folder, target, config, seed=args.seed)
    if frontend.num_tokens < target.vocab_size:
        target = replace(target, num_tokens=frontend.num_tokens)
    mesh = Mesh.of(config.tensor_parallel_size)
    draft = None if draft is None else draft.over(mesh.size)
    if target_params is None:
        target = target.over(mesh.size)
        size = parameter_bytes(target, config.dtype, _fewest_bits(target, quantize=quantize))
        check_machine_memory(f"the parameters of {model or folder}", size, config.dtype)
        loaded = _load(folder, target, config, mesh, quantize=rounded if quantize else None)
    else:
        loaded = Model(target, dict(target_params), load_kv_scales(folder, target))
    config = with_draft_quantization(config, target, draft, device_bytes(loaded.params))
    loaded, drafter = screened(loaded, draft, config, mesh), None
    if draft_folder is not None and draft is not None:
        drafter = _load_draft(draft_folder, draft, loaded, config, mesh)
    parameters = sum(device_bytes(model.params) for model in (loaded, drafter) if model is not None)
    config = fitted(target, draft, config, parameters)
    return frontend, Engine(loaded, drafter, mesh=mesh, config=config)


def _fewest_bits(target: TargetConfig, *, quantize: bool) -> int | None:
    """Bits of a number of most matrices, the fewest that they may have if the checkpoint does not say; None for all."""
    if quantize:
        return 8
    return None if target.quantization is None else target.quantization.bits or 4


def _load(
    folder: Path,
    model: TargetConfig | DraftConfig,
    config: EngineConfig,
    mesh: Mesh,
    *,
    is_final: bool = True,
    quantize: Callable[[np.ndarray], Matrix] | None = None,
) -> Model:
    """Load a model from its folder.

    The scales are loaded first: they are small, and may be refused.

    Args:
        folder: the model's folder.
        model: its configuration.
        config: dtype of the parameters.
        mesh: devices to load to.
        quantize: rounds its matrices; None leaves them.
        is_final: whether to bring the parameters into the layout that steps use; False keeps that of the file.
    """
    kv_scales = load_kv_scales(folder, model)
    transpose = is_final and mesh.size == 1 and not mesh.is_accelerator
    with explain_out_of_memory():
        params = load_params(folder, model, config.dtype, mesh.place, transpose=transpose, quantize=quantize)
        return Model(model, jax.block_until_ready(params), kv_scales)


def load_other_draft(draft_model: str | Path, engine: Engine) -> Model:
    """Load another drafter of the same configuration for an engine.

    Raises:
        ConfigError: its configuration differs.
        CheckpointError: a folder, file or tensor is missing, damaged or surplus.
    """
    folder = resolve_folder(draft_model)
    target = Model(engine.spec.target, engine.runner.params[0], None)
    draft = read_draft_config(folder, engine.spec.target)
    draft = draft.over(engine.config.tensor_parallel_size)
    if draft != engine.spec.draft:
        raise ConfigError(f"{folder}: its configuration is not that of the drafter in use; load it with a new LLM.")
    return _load_draft(folder, draft, target, engine.config, engine.runner.mesh)


def _load_draft(folder: Path, draft: DraftConfig, target: Model, config: EngineConfig, mesh: Mesh) -> Model:
    """Load a drafter; if it is quantised, its unquantised parameters are freed before the engine plans its memory."""
    if config.draft_quantization == "int4":  # rounded on the host: the device never holds the wide matrices
        return _load(folder, draft, config, mesh, quantize=rounded_int4)
    if config.draft_quantization is None:
        model = _load(folder, draft, config, mesh)
        return model if config.draft_dtype == config.dtype else narrowed(model, target, config.draft_dtype)
    return quantized(_load(folder, draft, config, mesh, is_final=False), target, mesh)


def _read_configs(folder: Path, draft_folder: Path | None) -> tuple[TargetConfig, DraftConfig | None]:
    """Read both configurations, and check them against each other before any tensor is loaded."""
    target = read_target_config(folder)
    return target, None if draft_folder is None else read_draft_config(draft_folder, target)


def _eos_token_ids(
    generation_config: Mapping[str, Any], target: TargetConfig, tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Every token that ends a text, from generation_config.json, config.json and the tokenizer."""
    ids = [*Fields(generation_config, "generation_config.json").token_ids("eos_token_id"), *target.eos_token_ids]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(ids))
