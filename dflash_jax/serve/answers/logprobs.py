"""Log-probabilities in the formats of OpenAI's two APIs and of vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dflash_jax.base.outputs import Logprob
from dflash_jax.text.tokenizer import Detokenizer, Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot write; vLLM's value
Alternatives = dict[int, Logprob]  # of one token: itself first, then the likeliest tokens


class TokenTexts:
    """Writes tokens as text, or as `token_id:7` if the client asks for it or there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool):
        self._tokenizer = None if as_ids else tokenizer

    def __call__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.decode_one(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        """The bytes of a token, which may be a part of a character, or those of what stands for it."""
        return list(self(token_id).encode() if self._tokenizer is None else self._tokenizer.token_bytes(token_id))


class TextOffsets:
    """Finds where tokens begin in a text, in characters; a token inside a character begins where the character does.

    Args:
        tokenizer: None leaves all offsets at `start`.
        text: the text of the first tokens, if it is known; tokens that it lacks, such as a prompt's first special
            token, have no length.
        start: the offset of the first token.
        prompt: token ids before the first token.
        skip_special_tokens: whether special tokens have no text.
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
        """The offset of each of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._end)
            piece = "" if self._detokenizer is None else self._detokenizer.push(token_id)
            if self._text is None or self._text.startswith(piece, self._end):
                self._end += len(piece)
        return offsets


def chat_logprobs(scores: Sequence[Alternatives], number: int, texts: TokenTexts) -> dict[str, Any]:
    """The `logprobs` of a chat's choice, with the `number` likeliest alternatives of each token."""

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        score = max(logprob.logprob, LOWEST)
        return {"token": texts(token_id), "logprob": score, "bytes": texts.bytes_of(token_id)}

    content = []
    for alternatives in scores:
        token_id = next(iter(alternatives))
        top = sorted(alternatives.items(), key=lambda item: item[1].rank)[:number]
        content.append(entry(token_id, alternatives[token_id]) | {"top_logprobs": [entry(*item) for item in top]})
    return {"content": content}


def completion_logprobs(
    scores: Sequence[Alternatives | None], token_ids: Sequence[int], texts: TokenTexts, offsets: Sequence[int]
) -> dict[str, Any]:
    """The `logprobs` of a completion's choice.

    Args:
        scores: of each token; None for the first token of a prompt, which has no log-probability.
        token_ids: of the choice, an echoed prompt's before them.
        texts: writes the tokens.
        offsets: where each token begins in the text.
    """
    chosen: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for token_id, alternatives in zip(token_ids, scores, strict=True):
        chosen.append(None if alternatives is None else max(alternatives[token_id].logprob, LOWEST))
        top.append(None if alternatives is None else _by_text(alternatives, texts))
    tokens = [texts(token_id) for token_id in token_ids]
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": list(offsets)}


def _by_text(alternatives: Alternatives, texts: TokenTexts) -> dict[str, float]:
    """Log-probabilities by text; where tokens have the same text, as parts of characters have, the first one counts."""
    by_text: dict[str, float] = {}
    for token_id, score in alternatives.items():
        by_text.setdefault(texts(token_id), max(score.logprob, LOWEST))
    return by_text


def prompt_logprobs(scores: Sequence[Alternatives | None]) -> list[dict[str, Any] | None]:
    """The `prompt_logprobs` of vLLM's answers; the first token of a prompt has none."""
    return [None if alternatives is None else _by_id(alternatives) for alternatives in scores]


def _by_id(alternatives: Alternatives) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": max(score.logprob, LOWEST), "rank": score.rank, "decoded_token": score.decoded_token}
        for token_id, score in alternatives.items()
    }
