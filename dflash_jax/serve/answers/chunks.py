"""The chunks of a stream: how many tokens one holds, and where its tokens came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_jax.serve.answers.usage import drafted_flags
from dflash_jax.serve.engine_link.link_messages import CompletionDelta
from dflash_jax.text.tokenizer import Detokenizer, Tokenizer


class TokenSources:
    """The `tokens` of a stream's chunks: the text of each token, and whether the drafter had proposed it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=False)

    def of(self, completion: CompletionDelta) -> list[dict[str, Any]]:
        """An entry for each token of a delta; the text of a character is that of the last of its tokens."""
        return [
            {"text": self._detokenizer.push(token_id), "drafted": drafted}
            for token_id, drafted in zip(completion.token_ids, drafted_flags(completion), strict=True)
        ]


class ChunkBuffer:
    """Holds back the deltas of a completion until they fill a chunk.

    Args:
        min_tokens: tokens of a chunk; the last may have fewer.
    """

    def __init__(self, min_tokens: int):
        self._min_tokens = min_tokens
        self._held: CompletionDelta | None = None

    def push(self, completion: CompletionDelta) -> CompletionDelta | None:
        """All that is held, this delta included, if it fills a chunk or ends the completion; else None."""
        self._held = completion if self._held is None else _joined(self._held, completion)
        if len(self._held.token_ids) < self._min_tokens and completion.finish_reason is None:
            return None
        held, self._held = self._held, None
        return held


def _joined(first: CompletionDelta, second: CompletionDelta) -> CompletionDelta:
    logprobs = None if first.logprobs is None else [*first.logprobs, *(second.logprobs or ())]
    return CompletionDelta(
        index=first.index,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        rounds=first.rounds + second.rounds,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        error=second.error,
    )
