"""Log-probabilities as OpenAI's two APIs and vLLM have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_jax.core import Logprob

LEAST = -9999.0  # what JSON has for minus infinity, as in vLLM
Alternatives = dict[int, Logprob]  # the token itself first, then the likeliest


class TokenTexts:
    """How tokens are written: as text, or as `token_id:7` where clients ask for it."""

    def __init__(self, *, as_ids: bool):
        self._as_ids = as_ids

    def __call__(self, token_id: int, logprob: Logprob) -> str:
        if self._as_ids or logprob.decoded_token is None:
            return f"token_id:{token_id}"
        return logprob.decoded_token


def chat_logprobs(found: Sequence[Alternatives], number: int, texts: TokenTexts) -> dict[str, Any]:
    """The `logprobs` of a chat's choice, with the `number` likeliest alternatives of each token."""

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        token = texts(token_id, logprob)
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
    found: Sequence[Alternatives | None], token_ids: Sequence[int], texts: TokenTexts, offset: int
) -> dict[str, Any]:
    """The `logprobs` of a completion's choice; `offset` is where its text begins, in characters.

    The first token of a prompt has none: it is known by its id alone.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    own: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for token_id, alternatives in zip(token_ids, found, strict=True):
        offsets.append(offset)
        logprob = Logprob(0.0, 0) if alternatives is None else alternatives[token_id]
        tokens.append(texts(token_id, logprob))
        own.append(None if alternatives is None else max(logprob.logprob, LEAST))
        top.append(
            None
            if alternatives is None
            else {texts(other, each): max(each.logprob, LEAST) for other, each in alternatives.items()}
        )
        offset += len(tokens[-1])
    return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}


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
