"""One completion while it grows: its tokens, its text, and when it ends. Pure host code."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from dflash_jax.checkpoint.tokenizer import Detokenizer, Tokenizer
from dflash_jax.core import CompletionOutput, Logprob, SamplingParams

TokenLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class Sequence:
    """A prompt and one completion of it.

    Attributes:
        prompt_token_ids: the prompt.
        params: of the request.
        seed: 64 bits; `params.seed` plus the completion's index, or drawn by the engine.
        eos_token_ids: tokens that end it, empty with `ignore_eos`.
        max_new_tokens: most tokens it may emit, within `max_model_len`.
        output: what came so far.
        acceptance_lengths: tokens of each round.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    max_new_tokens: int
    tokenizer: Tokenizer | None
    output: CompletionOutput
    acceptance_lengths: list[int] = field(default_factory=list)
    _detokenizer: Detokenizer | None = None
    _text: str = ""
    _unchecked: int = 0  # characters of _text before which no stop string may begin

    def __post_init__(self) -> None:
        if self.tokenizer is not None:
            self._detokenizer = Detokenizer(
                self.tokenizer, self.prompt_token_ids, skip_special_tokens=self.params.skip_special_tokens
            )
        if self.params.logprobs is not None:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.output.finish_reason is not None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every token that may end it."""
        return (*self.eos_token_ids, *self.params.stop_token_ids)

    def decode_one(self, token: int) -> str | None:
        """The text of one token on its own, None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode([token], skip_special_tokens=False)

    def extend(self, tokens: Iterable[int], logprobs: Seq[TokenLogprobs] | None) -> int:
        """Append what a step emitted, up to where the completion ends; returns how many tokens were taken."""
        taken = 0
        for token in tokens:
            taken += 1
            self.output.token_ids.append(token)
            if logprobs is not None and self.output.logprobs is not None:
                self._add_logprobs(token, logprobs[taken - 1])
            if self._ends_with(token):
                break
        self._publish_text()
        return taken

    def _add_logprobs(self, token: int, alternatives: TokenLogprobs) -> None:
        assert self.output.logprobs is not None
        assert self.output.cumulative_logprob is not None
        self.output.logprobs.append(alternatives)
        self.output.cumulative_logprob += alternatives[token].logprob

    def _ends_with(self, token: int) -> bool:
        """Whether the completion ends with this, its newest, token."""
        count = len(self.output.token_ids)
        may_stop = count > self.params.min_tokens
        if may_stop and token in self.stop_ids:
            if self.params.include_stop_str_in_output:
                self._add_text(token)
            stop_reason = None if token in self.eos_token_ids else token
            self._finish("stop", stop_reason)
        else:
            self._add_text(token)
            if not may_stop:
                self._unchecked = len(self._text)
            elif not self._stop_string():
                self._unchecked = max(self._unchecked, len(self._text) - self._holdback)
            if not self.finished and count >= self.max_new_tokens:
                self._finish("length", None)
        return self.finished

    def _add_text(self, token: int) -> None:
        if self._detokenizer is not None:
            self._text += self._detokenizer.push(token)

    @property
    def _holdback(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        return max((len(stop) for stop in self.params.stop), default=1) - 1

    def _stop_string(self) -> bool:
        """End at the earliest stop string in the unchecked text, if there is one."""
        found = [(at, stop) for stop in self.params.stop if (at := self._text.find(stop, self._unchecked)) >= 0]
        if not found:
            return False
        at, stop = min(found)
        self._text = self._text[: at + len(stop) if self.params.include_stop_str_in_output else at]
        self._detokenizer = None
        self._finish("stop", stop)
        return True

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        if self._detokenizer is not None:
            self._text += self._detokenizer.flush()
        self.output.finish_reason, self.output.stop_reason = reason, stop_reason

    def _publish_text(self) -> None:
        shown = len(self._text) if self.finished else max(len(self._text) - self._holdback, 0)
        self.output.text = self._text[:shown]
