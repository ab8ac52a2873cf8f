"""Log-probabilities as OpenAI's two APIs and vLLM have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dflash_jax.base.values import Logprob
from dflash_jax.text.tokenizer import Detokenizer, Tokenizer

LEAST = -9999.0  # what JSON has for minus infinity, as in vLLM
Alternatives = dict[int, Logprob]  # the token itself first, then the likeliest


class TokenTexts:
    """How tokens are written: as text, or as `token_id:7` where clients ask for it, or there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool):
        self._tokenizer = None if as_ids else tokenizer

    def __call__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.decode_one(token_id)


class TextOffsets:
    """Where tokens begin in a text, in characters; one that holds a part of a character begins where that does.

    Args:
        tokenizer: without it there is no text.
        text: what the first tokens stand in, if it is known: those that it lacks (a prompt's first special token) have
            no length.
        prompt: token ids before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        text: str | None = None,
        start: int = 0,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = False,
    ):
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
        self._text, self._end = text, start

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """Of further tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._end)
            piece = "" if self._detokenizer is None else self._detokenizer.push(token_id)
            if self._text is None or self._text.startswith(piece, self._end):
                self._end += len(piece)
        return offsets


def chat_logprobs(found: Sequence[Alternatives], number: int, texts: TokenTexts) -> dict[str, Any]:
    """The `logprobs` of a chat's choice, with the `number` likeliest alternatives of each token."""

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        token = texts(token_id)
        return {"token": token, "logprob": max(logprob.logprob, LEAST), "bytes": list(token.encode())}

    content = []
    for alternatives in found:
        token_id = next(iter(alternatives))
        top = sorted(alternatives.items(), key=lambda item: item[1].rank)[:number]
        content.append(
            entry(token_id, alternatives[token_id]) | {"top_logprobs": [entry(other, each) for other, each in top]}
        )
    return {"content": content}


def completion_logprobs(
    found: Sequence[Alternatives | None], token_ids: Sequence[int], texts: TokenTexts, offsets: Sequence[int]
) -> dict[str, Any]:
    """The `logprobs` of a completion's choice; the first token of a prompt has none."""
    own: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for token_id, alternatives in zip(token_ids, found, strict=True):
        own.append(None if alternatives is None else max(alternatives[token_id].logprob, LEAST))
        top.append(None if alternatives is None else _by_text(alternatives, texts))
    tokens = [texts(token_id) for token_id in token_ids]
    return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": list(offsets)}


def _by_text(alternatives: Alternatives, texts: TokenTexts) -> dict[str, float]:
    """Logprobs by the texts of tokens; of tokens that are written alike (parts of characters), the first counts."""
    by_text: dict[str, float] = {}
    for token_id, each in alternatives.items():
        by_text.setdefault(texts(token_id), max(each.logprob, LEAST))
    return by_text


def prompt_logprobs(found: Sequence[Alternatives | None] | None) -> list[dict[str, Any] | None] | None:
    """The `prompt_logprobs` of vLLM's answers."""
    if found is None:
        return None
    return [
        None
        if alternatives is None
        else {
            str(token_id): {"logprob": max(each.logprob, LEAST), "rank": each.rank, "decoded_token": each.decoded_token}
            for token_id, each in alternatives.items()
        }
        for alternatives in found
    ]
