"""The text side of a model folder: tokenizer, chat template and recommended sampling."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from dflash_jax.base.errors import ConfigError, RequestError
from dflash_jax.base.values import SamplingParams, TokensPrompt
from dflash_jax.spec.fields import read_json
from dflash_jax.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Renderer:
    """Turns chats into prompts by the chat template and tokenizer of a model folder.

    Attributes:
        tokenizer: None where the folder has none.
        generation_config: the content of `generation_config.json`; empty where the folder has none.

    Raises:
        CheckpointError: the tokenizer cannot be read.
    """

    def __init__(self, folder: Path):
        self.tokenizer = Tokenizer.of(folder)
        path = folder / "generation_config.json"
        self.generation_config: dict[str, Any] = read_json(path) if path.exists() else {}

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters that `generation_config.json` recommends, as vLLM reads it.

        Raises:
            ConfigError: a value is outside its range.
        """
        chosen = {
            name: self.generation_config[name]
            for name in GENERATION_FIELDS
            if self.generation_config.get(name) is not None
        }
        try:
            return SamplingParams(**chosen)
        except RequestError as error:
            raise ConfigError(f"generation_config.json: {error}") from error

    def chat_text(
        self,
        messages: Seq[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of the prompt that the chat template makes of a conversation, special tokens included.

        Args:
            messages: of the conversation, in OpenAI's form.
            chat_template: replaces the model's; Jinja.
            add_generation_prompt: whether the prompt ends where the assistant begins to speak.
            chat_template_kwargs: further variables of the template.

        Raises:
            RequestError: the model has no tokenizer or no chat template, or the template refuses the messages.
        """
        return self.need_tokenizer("a chat").render_chat(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            options=chat_template_kwargs,
        )

    def chat_prompt(self, messages: Seq[Message], **options: Any) -> TokensPrompt:
        """The token ids of `chat_text`, which see for arguments and errors."""
        text = self.chat_text(messages, **options)
        return {"prompt_token_ids": self.need_tokenizer("a chat").encode(text, add_special_tokens=False)}

    def chat_template(self, chat_template: str | None = None) -> str | None:
        """The source of the template that renders chats with tools; None if there is none.

        Args:
            chat_template: replaces the model's.
        """
        return None if self.tokenizer is None else self.tokenizer.chat_template(chat_template)

    def need_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer.

        Raises:
            RequestError: there is none, and `what` needs one.
        """
        if self.tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer and the model folder has none; give token ids.")
        return self.tokenizer
