"""Text to tokens and back: the tokenizer and chat template of a model folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import DecodeStream
from tokenizers.pre_tokenizers import ByteLevel

from dflash_jax.base.errors import CheckpointError, RequestError
from dflash_jax.text.chat_template import ChatTemplate

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
PROMPT_TAIL = 8  # prompt tokens that a decoder is primed with, so that a first space is kept
NFC_SHRINKS = 4  # characters that Unicode's canonical composition may join to one, at most (as in U+1F82)


def _tokenizer_class(folder: Path) -> Any:
    """The class of transformers' that reads a folder's tokenizer as its files say.

    `AutoTokenizer` goes by the name of a class, and Qwen2's cuts text by Qwen2's rule whatever tokenizer.json says:
    letters of Hindi lose their vowel signs in Qwen3.5's, which name that class. Models that transformers knows of are
    spared that; `qwen3_5_text` is none of them.
    """
    logger = logging.getLogger("transformers")

    def is_about_something_else(record: logging.LogRecord) -> bool:
        return "PyTorch" not in record.getMessage()

    logger.addFilter(is_about_something_else)  # that torch is absent, which it is on purpose
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    finally:
        logger.removeFilter(is_about_something_else)
    return PreTrainedTokenizerFast if (folder / "tokenizer.json").exists() else AutoTokenizer


class Tokenizer:
    """The tokenizer of a model folder. No code of the folder is run; chat templates run in jinja's sandbox.

    Threads may share a tokenizer.

    Attributes:
        hf: transformers' tokenizer.

    Raises:
        CheckpointError: the tokenizer cannot be read, or is not a fast one.
    """

    def __init__(self, folder: Path):
        try:
            tokenizer = _tokenizer_class(folder).from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers raises anything on a damaged file
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(
                f"{folder}: the tokenizer cannot be read ({reason}); download its files again."
            ) from error
        if not tokenizer.is_fast:
            raise CheckpointError(f"{folder} has no tokenizer.json; convert the tokenizer to the fast format.")
        self.hf = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._templates: dict[str, ChatTemplate] = {}  # by source: the folder's, and those of callers
        self._added = frozenset(tokenizer.added_tokens_decoder)
        self._texts: dict[int, str] = {}  # the text of single tokens by id, filled as they are asked for

    @staticmethod
    def of(folder: Path) -> Tokenizer | None:
        """The folder's tokenizer; None if it has none, and prompts must be token ids."""
        return Tokenizer(folder) if any((folder / name).exists() for name in TOKENIZER_FILES) else None

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end-of-sequence token; None if there is none."""
        return self.hf.eos_token_id

    @property
    def num_tokens(self) -> int:
        """One more than the largest id of a token, added ones included."""
        return 1 + max(self._backend.get_vocab().values(), default=-1)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name; None if there is none."""
        return self._backend.token_to_id(token)

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder has a chat template."""
        return bool(self.hf.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` adds those that the model expects around it.

        This calls the tokenizers library itself: for 2.1 million characters of English, transformers' `encode` takes
        6.7 s on a shared CPU where this takes 0.9 s, and other threads wait up to 194 ms for the GIL, here 39 ms.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair, or a command line that is not UTF-8
            raise RequestError(f"the text is not valid Unicode ({error}); decode it properly.") from error
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of a text, found without tokenising; 0 where no bound is known."""
        if self._longest_token is None:
            return 0
        can_shrink = self._backend.normalizer is not None and not text.isascii()
        longest = self._longest_token * (NFC_SHRINKS if can_shrink else 1)
        return -(-len(text) // longest)

    @cached_property
    def _longest_token(self) -> int | None:
        """Most characters of normalised text that one token stands for; None where there is no such bound.

        There is one for byte-level BPE that keeps every character. Other tokenizers may drop white space, or make one
        token of a word however long it is.
        """
        normalizer = self._backend.normalizer
        steps = list(_pre_tokenizers(self._backend.pre_tokenizer))
        vocabulary = self._backend.get_vocab()
        keeps_text = (
            (normalizer is None or json.loads(normalizer.__getstate__())["type"] == "NFC")
            and any(step["type"] == "ByteLevel" for step in steps)
            and all(step["type"] in ("ByteLevel", "Digits", "Split") for step in steps)
            and not any(step.get("behavior") == "Removed" for step in steps)
            and all(letter in vocabulary for letter in ByteLevel.alphabet())
            and not any(added.lstrip or added.rstrip for added in self._backend.get_added_tokens_decoder().values())
        )
        return max(map(len, vocabulary)) if keeps_text else None  # the vocabulary has one letter for each byte

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become replacement characters."""
        return str(self.hf.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def decode_one(self, token_id: int) -> str:
        """Text of a token on its own."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, which may be a part of a character."""
        token = self._backend.id_to_token(token_id)
        if token is None or self._bytes_of is None or token_id in self._added:
            return self.decode_one(token_id).encode()
        return bytes(self._bytes_of[character] for character in token)

    @cached_property
    def _bytes_of(self) -> dict[str, int] | None:
        """The byte that each character of a token's name stands for; None if names are no bytes."""
        if not isinstance(self._backend.decoder, ByteLevelDecoder):
            return None
        # GPT-2's alphabet: printable bytes stand for themselves, the others are numbered from 256 on.
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of the prompt that the chat template makes of a conversation, special tokens included.

        Raises:
            RequestError: there is no chat template, or it refuses the messages.
        """
        if chat_template is None and not self.has_chat_template:
            raise RequestError("this model has no chat template; use generate(), or pass chat_template=.")
        variables = dict(options or {})
        try:
            template = self._template(chat_template, variables.get("tools"))
            text = template.render(messages, variables, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise RequestError(
                f"the chat template refused the messages ({error}); check roles and contents."
            ) from error
        return text

    def chat_template(self, chat_template: str | None = None) -> str | None:
        """The source of the template for chats with tools; None if the folder has none, and none is given."""
        if chat_template is None and not self.has_chat_template:
            return None
        return str(self.hf.get_chat_template(chat_template, tools=[{}]))

    def _template(self, chat_template: str | None, tools: Any) -> ChatTemplate:
        """The template of that source or name, else the folder's, which may have one of its own for tools."""
        source = self.hf.get_chat_template(chat_template, tools=tools)
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source, self.hf.apply_chat_template)
        return self._templates[source]


def _pre_tokenizers(pre_tokenizer: Any) -> Iterator[dict[str, Any]]:
    """The settings of each step of a pre-tokenizer of the tokenizers library; none for None."""
    state = None if pre_tokenizer is None else json.loads(pre_tokenizer.__getstate__())
    if state is not None:
        yield from state["pretokenizers"] if state["type"] == "Sequence" else [state]


class Detokenizer:
    """The text of one completion while its tokens come; a character leaves when it is complete.

    It is primed with the last `PROMPT_TAIL` tokens of the prompt, so that a completion keeps the space in between.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(ids=list(prompt_token_ids[-PROMPT_TAIL:]), skip_special_tokens=skip_special_tokens)
        self._pending: list[int] = []
        self._backend = tokenizer.hf.backend_tokenizer

    def push(self, *token_ids: int) -> str:
        """The text that these tokens complete; empty while the last of them ends inside a character."""
        self._pending += token_ids
        text = self._stream.step(self._backend, list(token_ids))
        if text is None:
            return ""
        self._pending.clear()
        return text

    def flush(self) -> str:
        """The text of the tokens that have not completed a character."""
        text = self._tokenizer.decode(self._pending, skip_special_tokens=self._skip_special_tokens)
        self._pending.clear()
        return text
