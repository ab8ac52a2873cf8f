"""`LLM`: a target and its drafter, which complete prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dflash_jax.base.errors import RequestError
from dflash_jax.base.outputs import RequestOutput
from dflash_jax.base.values import Prompt, SamplingParams
from dflash_jax.engine.host.inputs import load_of
from dflash_jax.engine.host.request import Request, one_each
from dflash_jax.frontend import load, load_other_draft
from dflash_jax.options import EngineArgs
from dflash_jax.progress import Begin, phase
from dflash_jax.text.renderer import Message


class LLM:
    """A loaded model that completes prompts.

    Args:
        model: a folder, or a Hugging Face Hub id, of a Qwen3 or Llama model; None serves the embedded pair.
        draft_model: folder or Hub id of its DFlash drafter; None decodes one token a pass.
        target_params: the model's parameters where they are on the devices already, as in training: dtype and shardings
            must be the engine's. None loads them.
        options: see `EngineArgs`.

    Raises:
        ConfigError: an unknown architecture, a drafter that does not fit, or an unknown or impossible option.
        CheckpointError: a folder, file or tensor is missing, damaged or surplus.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft_model: str | Path | None = None,
        *,
        target_params: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        self.frontend, self.engine = load(model, draft_model, EngineArgs.of(options), target_params)
        self.config, self.tokenizer = self.engine.config, self.frontend.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generation_config.json` recommends, as vLLM reads it."""
        return self.frontend.get_default_sampling_params()

    def replace_draft(self, draft_model: str | Path) -> None:
        """Replace the weights of the drafter by those of another one of the same configuration; training does this.

        Raises:
            ConfigError: its configuration differs.
            CheckpointError: a folder, file or tensor is missing, damaged or surplus.
            RuntimeError: the engine is not idle.
        """
        self.engine.replace_draft(load_other_draft(draft_model, self.engine))

    def compile(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        within: Begin = phase,
    ) -> None:
        """Compile the programs that `generate` needs for these prompts and parameters, and show the progress.

        Without this call, each program is compiled when it is first needed, while others run.

        Args:
            prompts: as for `generate`.
            sampling_params: as for `generate`.
            within: begins the phase in which a command shows the progress.

        Raises:
            RequestError: a prompt or its parameters cannot be served.
        """
        requests = self._requests(prompts, sampling_params)
        sequences = [sequence for request in requests for sequence in request.sequences]
        if sequences:
            self.engine.compile(load_of(sequences), within=within)

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: a string, `{"prompt_token_ids": [...]}`, or a list of these.
            sampling_params: for all prompts or one for each; None takes `get_default_sampling_params()`.
            use_tqdm: whether to show a progress bar; or a callable that makes one in place of `tqdm.tqdm`.

        Returns:
            One finished output a prompt, in order.

        Raises:
            RequestError: a prompt or its parameters cannot be served; then no prompt is run.
        """
        finished: dict[str, RequestOutput] = {}
        requests = self._requests(prompts, sampling_params)
        make_bar = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
        with make_bar(total=len(requests), desc="Processed prompts") as bar:
            for request in self._changes(requests):
                if request.finished:
                    finished[request.request_id] = request.output()
                    bar.update()
        return [finished[request.request_id] for request in requests]

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields a request's output so far whenever a step has added to it.

        Texts never end inside a character, nor with what may become the beginning of a stop string.
        """
        return (request.output() for request in self._changes(self._requests(prompts, sampling_params)))

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
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
            self.frontend.chat_prompt(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

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
                requests.append(self.frontend.request(prompt, params))
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}") from error
        return requests

    def _changes(self, requests: list[Request]) -> Iterator[Request]:
        """Run requests; yields those that a step has added to, after each step."""
        owner = {id(sequence): request for request in requests for sequence in request.sequences}
        for changed in self.engine.run([sequence for request in requests for sequence in request.sequences]):
            for request in {owner[id(sequence)]: None for sequence in changed}:
                request.touch()
                yield request
