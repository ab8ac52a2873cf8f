"""Text to tokens and back: the tokenizer and chat template of a model folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream

from dflash_jax.base.errors import CheckpointError, RequestError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
PROMPT_TAIL = 8  # prompt tokens that a decoder is primed with, so that a first space is kept


def auto_tokenizer() -> Any:
    """Transformers' AutoTokenizer, imported without its remark that torch is absent: that is on purpose."""
    logger = logging.getLogger("transformers")

    def is_no_remark(record: logging.LogRecord) -> bool:
        return "PyTorch" not in record.getMessage()

    logger.addFilter(is_no_remark)
    try:
        from transformers import AutoTokenizer
    finally:
        logger.removeFilter(is_no_remark)
    return AutoTokenizer


class Tokenizer:
    """The tokenizer of a folder. No code comes from the folder; chat templates run in jinja's sandbox."""

    def __init__(self, folder: Path):
        try:
            tokenizer = auto_tokenizer().from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # whatever transformers stumbles over in a damaged file
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(
                f"{folder}: the tokenizer cannot be read ({reason}); download its files again."
            ) from error
        if not tokenizer.is_fast:
            raise CheckpointError(f"{folder} has no tokenizer.json; convert the tokenizer to the fast format.")
        self.hf = tokenizer
        self._texts: dict[int, str] = {}  # of single tokens, at most one for each in the vocabulary

    @staticmethod
    def of(folder: Path) -> Tokenizer | None:
        """The folder's tokenizer, None if it has none (then prompts must be token ids)."""
        return Tokenizer(folder) if any((folder / name).exists() for name in TOKENIZER_FILES) else None

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token."""
        return self.hf.eos_token_id

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name, None if there is none."""
        return self.hf.get_vocab().get(token)

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder says what a conversation looks like."""
        return bool(self.hf.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the model expects around it.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair, or a command line that is no UTF-8
            raise RequestError(f"the text is not valid Unicode ({error}); decode it properly.") from error
        return self.hf.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 come as replacement characters."""
        return str(self.hf.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def decode_one(self, token_id: int) -> str:
        """Text of a token on its own."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that a conversation becomes; it holds its special tokens.

        Raises:
            RequestError: there is no chat template, or it refuses the messages.
        """
        if chat_template is None and not self.has_chat_template:
            raise RequestError("this model has no chat template; use generate(), or pass chat_template=.")
        try:
            text: str = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **(options or {}),
            )
        except Exception as error:  # a template may raise anything: it is a program of the model's author
            raise RequestError(
                f"the chat template refused the messages ({error}); check roles and contents."
            ) from error
        return text


class Detokenizer:
    """Text of one completion as its tokens come, never a part of a character.

    Primed with the end of the prompt, so that a completion keeps the space between it and the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(ids=list(prompt_token_ids[-PROMPT_TAIL:]), skip_special_tokens=skip_special_tokens)
        self._pending: list[int] = []
        self._backend = tokenizer.hf.backend_tokenizer

    def push(self, *token_ids: int) -> str:
        """The text that tokens complete together: none yet where the last of them ends inside a character."""
        self._pending += token_ids
        text = self._stream.step(self._backend, list(token_ids))
        if text is None:
            return ""
        self._pending.clear()
        return text

    def flush(self) -> str:
        """The text of tokens that never completed a character."""
        text = self._tokenizer.decode(self._pending, skip_special_tokens=self._skip_special_tokens)
        self._pending.clear()
        return text
