"""`LLM`: a target, a drafter, and text out of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import count
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from dflash_jax.checkpoint.folder import resolve_folder
from dflash_jax.checkpoint.loader import load_kv_scales, load_params
from dflash_jax.checkpoint.tokenizer import Tokenizer
from dflash_jax.config import (
    DraftConfig,
    EngineConfig,
    Fields,
    TargetConfig,
    check_draft_fits,
    draft_config,
    read_json,
    target_config,
)
from dflash_jax.core import SEED_LIMIT, CompletionOutput, Prompt, RequestOutput, SamplingParams, TokensPrompt, is_int
from dflash_jax.engine.engine import Engine, Model
from dflash_jax.engine.memory import explain_out_of_memory
from dflash_jax.engine.request import Request, check_params, one_each, tokenize
from dflash_jax.engine.sequence import Sequence
from dflash_jax.engine.sharding import Mesh
from dflash_jax.errors import ConfigError, RequestError

EMBEDDED = Path(__file__).parent / "embedded"
Message = Mapping[str, Any]


class LLM:
    """A loaded model that completes prompts.

    Args:
        model: a folder, or a Hugging Face Hub id, of a Qwen3 or Llama model; None serves the embedded pair.
        draft_model: the same of its DFlash drafter; None decodes one token a pass.
        dtype: "auto" (the checkpoint's; float16 and fp8 become bfloat16), "float32" or "bfloat16".
        kv_cache_dtype: "auto" (dtype), "float32", "bfloat16", "fp8_e4m3", "fp8_e5m2" or "fp8" (e4m3).
        draft_kv_cache_dtype: the same of the drafter's; "auto" takes kv_cache_dtype.
        tensor_parallel_size: devices that share the model.
        max_model_len: most tokens of prompt and completion; None takes the target's max_position_embeddings.
        max_num_seqs: most sequences that run side by side.
        max_num_batched_tokens: most prompt tokens processed in one step, over all sequences.
        num_speculative_tokens: drafts a round, at most the drafter's block_size - 1 (the default).
        page_size: tokens a page of the KV cache.
        enable_prefix_caching: keep the pages of past prompts, and take them up again for a prompt that begins alike.
        gpu_memory_utilization: share of the device's memory for parameters and KV cache.
        kv_cache_memory_bytes: memory for the KV cache of all devices together; overrides the share.
        seed: of the seeds drawn for requests that bring none; None makes every run differ.

    Raises:
        ConfigError: an unknown architecture, a drafter that does not fit, or an impossible option.
        CheckpointError: a folder, file or tensor is missing, damaged or surplus.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft_model: str | Path | None = None,
        *,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        draft_kv_cache_dtype: str = "auto",
        tensor_parallel_size: int = 1,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 8192,
        num_speculative_tokens: int | None = None,
        page_size: int = 64,
        enable_prefix_caching: bool = True,
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory_bytes: int | None = None,
        seed: int | None = 0,
    ):
        if seed is not None and not is_int(seed):
            raise ConfigError(f"seed={seed!r} must be an integer.")
        if model is None:
            model, draft_model = EMBEDDED / "target", draft_model or EMBEDDED / "draft"
        folder = resolve_folder(model)
        draft_folder = None if draft_model is None else resolve_folder(draft_model)
        target, draft = _read_configs(folder, draft_folder)
        self.config = EngineConfig.of(
            target,
            draft,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            draft_kv_cache_dtype=draft_kv_cache_dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_speculative_tokens=num_speculative_tokens,
            tensor_parallel_size=tensor_parallel_size,
            page_size=page_size,
            enable_prefix_caching=enable_prefix_caching,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
        )
        self.tokenizer = Tokenizer.of(folder)
        self.generation_config = _read_generation_config(folder)
        self.eos_token_ids = _eos_token_ids(self.generation_config, target, self.tokenizer)
        mesh = Mesh.of(tensor_parallel_size)
        self.engine = Engine(
            _load(folder, target, self.config, mesh),
            _load(draft_folder, draft, self.config, mesh) if draft is not None and draft_folder is not None else None,
            mesh=mesh,
            config=self.config,
        )
        self._seeds = random.Random(seed)
        self._request_ids = count()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generation_config.json` recommends, as vLLM reads it."""
        names = ("temperature", "top_p", "top_k", "min_p")
        chosen = {n: self.generation_config[n] for n in names if self.generation_config.get(n) is not None}
        try:
            return SamplingParams(**chosen)
        except RequestError as error:
            raise ConfigError(f"generation_config.json: {error}") from error

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: a string, `{"prompt_token_ids": [...]}`, or a list of these.
            sampling_params: for all prompts or one for each; None takes `get_default_sampling_params()`.
            use_tqdm: show a progress bar.

        Returns:
            One finished output a prompt, in order.

        Raises:
            RequestError: a prompt or its parameters cannot be served; then nothing has been run.
        """
        finished: dict[str, RequestOutput] = {}
        requests = self._requests(prompts, sampling_params)
        with tqdm(total=len(requests), disable=not use_tqdm, desc="Processed prompts") as bar:
            for output in self._outputs(requests):
                if output.finished:
                    finished[output.request_id] = output
                    bar.update()
        return [finished[request.request_id] for request in requests]

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields a request's output so far whenever a step has added to it.

        Texts never show a part of a character, nor what may turn out to be the beginning of a stop string.
        """
        return self._outputs(self._requests(prompts, sampling_params))

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations: one list of messages, or a list of such lists.

        Raises:
            RequestError: as `generate`; also if the model has no tokenizer or no chat template.
        """
        if not messages:
            raise RequestError("messages is empty; give at least one message.")
        if not isinstance(messages, Seq):
            raise RequestError(f"messages of type {type(messages).__name__} are not a list of messages.")
        conversations: Seq[Any] = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [
            self.chat_prompt(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(
        self,
        messages: Seq[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokensPrompt:
        """The prompt that a conversation becomes, for `generate` or `stream`.

        Raises:
            RequestError: the model has no tokenizer or no chat template, or the template refuses the messages.
        """
        if self.tokenizer is None:
            raise RequestError("a chat needs a tokenizer and the model folder has none; use generate() with token ids.")
        token_ids = self.tokenizer.chat(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            options=chat_template_kwargs,
        )
        return {"prompt_token_ids": token_ids}

    def _requests(
        self, prompts: Prompt | Seq[Prompt], sampling_params: SamplingParams | Seq[SamplingParams] | None
    ) -> list[Request]:
        """Check every prompt before any is run."""
        is_one = isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable)
        listed: Seq[Any] = [prompts] if is_one else list(prompts)
        chosen = self.get_default_sampling_params() if sampling_params is None else sampling_params
        every_params = one_each(chosen, len(listed))
        requests = []
        for i, (prompt, params) in enumerate(zip(listed, every_params, strict=True)):
            try:
                requests.append(self._request(prompt, params))
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}") from error
        return requests

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        vocab_size = self.engine.target.config.vocab_size
        text, token_ids = tokenize(prompt, self.tokenizer, vocab_size=vocab_size)
        max_new_tokens = check_params(
            params,
            prompt_length=len(token_ids),
            max_model_len=self.config.max_model_len,
            vocab_size=vocab_size,
            has_tokenizer=self.tokenizer is not None,
        )
        seed = self._seeds.randrange(SEED_LIMIT) if params.seed is None else params.seed
        sequences = [
            Sequence(
                prompt_token_ids=token_ids,
                params=params,
                seed=(seed + i) % SEED_LIMIT,
                eos_token_ids=() if params.ignore_eos else self.eos_token_ids,
                max_new_tokens=max_new_tokens,
                tokenizer=self.tokenizer,
                output=CompletionOutput(index=i),
            )
            for i in range(params.n)
        ]
        return Request(str(next(self._request_ids)), text, token_ids, sequences)

    def _outputs(self, requests: list[Request]) -> Iterator[RequestOutput]:
        owner = {id(sequence): request for request in requests for sequence in request.sequences}
        for changed in self.engine.run([sequence for request in requests for sequence in request.sequences]):
            for request in {owner[id(sequence)]: None for sequence in changed}:
                yield request.output()


def _read_configs(folder: Path, draft_folder: Path | None) -> tuple[TargetConfig, DraftConfig | None]:
    """Both configurations, checked against each other before any tensor is looked at."""
    path = folder / "config.json"
    target = target_config(read_json(path), str(path))
    if draft_folder is None:
        return target, None
    path = draft_folder / "config.json"
    draft = draft_config(read_json(path), str(path), num_target_layers=target.num_hidden_layers)
    check_draft_fits(target, draft, str(path))
    return target, draft


def _load(folder: Path, config: TargetConfig | DraftConfig, options: EngineConfig, mesh: Mesh) -> Model:
    """A model from its folder; the scales come first, since they are small and may be refused."""
    kv_scales = load_kv_scales(folder, config)
    with explain_out_of_memory():
        params = jax.block_until_ready(load_params(folder, config, options.dtype, mesh.place))
    return Model(config, params, kv_scales)


def _read_generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}


def _eos_token_ids(
    generation_config: Mapping[str, Any], target: TargetConfig, tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Every token that ends a text: generation_config.json's, config.json's and the tokenizer's."""
    ids = [*Fields(generation_config, "generation_config.json").token_ids("eos_token_id"), *target.eos_token_ids]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(ids))
