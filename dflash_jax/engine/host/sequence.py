"""One completion while it grows: its tokens, its text, and when it ends. Pure host code."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from dflash_jax.base.outputs import CompletionOutput, Logprob
from dflash_jax.base.values import SamplingParams
from dflash_jax.engine.host.constraints import Constraint
from dflash_jax.text.tokenizer import Detokenizer, Tokenizer

TokenLogprobs = dict[int, Logprob]
DECODED_AT_ONCE = 16  # tokens handed to the detokenizer in one call


@dataclass(slots=True)
class Sequence:
    """A prompt and one completion of it.

    Attributes:
        prompt_token_ids: the prompt.
        params: sampling parameters of the request.
        seed: 64 bits; `params.seed` plus the completion's index, or drawn by the frontend.
        eos_token_ids: tokens that end it; empty with `ignore_eos`.
        max_new_tokens: most tokens that it may emit, within `max_model_len`.
        output: what came so far; its text is that of the last `publish_text`, which is also called at the end.
        constraint: grammar that its text must obey; None for none.
        first: the first completion of the same prompt, whose pages the others share; None for the first itself.
        cache_salt: prefix-cache pages are shared only among sequences of equal salt; None shares nothing.
        acceptance_lengths: tokens emitted by each round.
        draft_lengths: drafts verified by each round.
        started: `time.perf_counter()` when it was first admitted; None while it waits.
        prompt_logprobs: log-probabilities of the prompt's tokens from the second on, as far as they are known.
        num_cached_tokens: prompt tokens that the prefix cache had.
        suspect: whether a step that it took part in has failed, and it has completed no round since.
        mode: sampling mode that its next tokens need, as `inputs.mode_of` found it last; None before that.
        page_hashes: hashes of the first whole pages of prompt and completion, as far as the scheduler has made them.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    max_new_tokens: int
    tokenizer: Tokenizer | None
    output: CompletionOutput
    constraint: Constraint | None = None
    first: Sequence | None = None
    cache_salt: bytes | None = b""
    acceptance_lengths: list[int] = field(default_factory=list)
    draft_lengths: list[int] = field(default_factory=list)
    started: float | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    suspect: bool = False
    mode: Any = None
    page_hashes: list[bytes] = field(default_factory=list)
    _detokenizer: Detokenizer | None = None
    _text: str = ""
    _decoded: int = 0  # tokens that are in _text, or wait in the detokenizer
    _stop_ids: frozenset[int] = frozenset()
    _holdback: int = 0  # characters at the end that may be the beginning of a stop string
    _unchecked: int = 0  # characters of _text before which no stop string may begin

    def __post_init__(self) -> None:
        if self.tokenizer is not None:
            self._detokenizer = Detokenizer(
                self.tokenizer, self.prompt_token_ids, skip_special_tokens=self.params.skip_special_tokens
            )
        self._stop_ids = frozenset(self.stop_ids)
        self._holdback = max((len(stop) for stop in self.params.stop), default=1) - 1
        if self.params.logprobs is not None:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.output.finish_reason is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are wanted and not all known."""
        wanted = self.params.prompt_logprobs is not None and self.output.index == 0
        return wanted and len(self.prompt_logprobs) < len(self.prompt_token_ids) - 1

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every token that may end it."""
        return (*self.eos_token_ids, *self.params.stop_token_ids)

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Tokens of prompt and completion from one position up to another."""
        before = len(self.prompt_token_ids)
        if start >= before:  # do not copy a long prompt for a few tokens
            return self.output.token_ids[start - before : end - before]
        return self.prompt_token_ids[start:end] + self.output.token_ids[: max(end - before, 0)]

    def decode_one(self, token: int) -> str | None:
        """The text of one token on its own, None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode_one(token)

    def extend(self, tokens: list[int], logprobs: Seq[TokenLogprobs] | None) -> int:
        """Append the tokens of a step up to where the completion ends; return how many were taken."""
        if self.finished or self._is_broken():  # a constraint that broke has let any token pass
            return 0
        if logprobs is None and self.constraint is None and self._cannot_end_in(tokens):
            self.output.token_ids += tokens
            return len(tokens)
        taken = 0
        for token in tokens:
            taken += 1
            self.output.token_ids.append(token)
            if logprobs is not None and self.output.logprobs is not None:
                self._add_logprobs(token, logprobs[taken - 1])
            if self._ends_with(token) or self._completes(token):
                break
        if self.finished:
            self.publish_text()
        return taken

    def _cannot_end_in(self, tokens: list[int]) -> bool:
        """Whether none of these tokens can be the last: then they need not be checked one by one."""
        count = len(self.output.token_ids) + len(tokens)
        return not self.params.stop and count < self.max_new_tokens and self._stop_ids.isdisjoint(tokens)

    def _completes(self, token: int) -> bool:
        """Whether it ends with its newest token because its constraint allows no further token, or has broken."""
        if self.constraint is not None:
            self.constraint.accept([token])
            if not self._is_broken() and self.constraint.is_complete:
                self._finish("stop", None)
        return self.finished

    def _is_broken(self) -> bool:
        """Whether its constraint has failed; the sequence then fails with the same error."""
        if self.constraint is None or self.constraint.error is None:
            return False
        self.fail(self.constraint.error)
        return True

    def fail(self, cause: str) -> None:
        """End it with an error; its output keeps what was emitted."""
        self.output.finish_reason, self.output.error = "error", cause

    def _add_logprobs(self, token: int, alternatives: TokenLogprobs) -> None:
        assert self.output.logprobs is not None
        assert self.output.cumulative_logprob is not None
        self.output.logprobs.append(alternatives)
        self.output.cumulative_logprob += alternatives[token].logprob

    def _ends_with(self, token: int) -> bool:
        """Whether the completion ends with this token, its newest."""
        count = len(self.output.token_ids)
        may_stop = count > self.params.min_tokens
        if may_stop and token in self._stop_ids:
            stop_reason = None if token in self.eos_token_ids else token
            self._finish("stop", stop_reason, shown=count if self.params.include_stop_str_in_output else count - 1)
        else:
            if self.params.stop:
                self._decode(count)
                if not may_stop:
                    self._unchecked = len(self._text)
                elif not self._stop_string():
                    self._unchecked = max(self._unchecked, len(self._text) - self._holdback)
            if not self.finished and count >= self.max_new_tokens:
                self._finish("length", None)
        return self.finished

    def _decode(self, count: int) -> None:
        """Extend the text to the first `count` tokens."""
        if self._detokenizer is not None:
            while self._decoded < count:
                start, self._decoded = self._decoded, min(self._decoded + DECODED_AT_ONCE, count)
                self._text += self._detokenizer.push(*self.output.token_ids[start : self._decoded])

    def _stop_string(self) -> bool:
        """End at the earliest stop string in the unchecked text, if there is one."""
        matches = [(at, stop) for stop in self.params.stop if (at := self._text.find(stop, self._unchecked)) >= 0]
        if not matches:
            return False
        at, stop = min(matches)
        self._text = self._text[: at + len(stop) if self.params.include_stop_str_in_output else at]
        self._detokenizer = None  # what it holds back lies behind the end
        self._finish("stop", stop)
        return True

    def _finish(self, reason: str, stop_reason: int | str | None, *, shown: int | None = None) -> None:
        """End it, with the text of its first `shown` tokens; None shows all."""
        self._decode(len(self.output.token_ids) if shown is None else shown)
        if self._detokenizer is not None:
            self._text += self._detokenizer.flush()
            self._detokenizer = None
        self.output.finish_reason, self.output.stop_reason = reason, stop_reason

    def publish_text(self) -> None:
        """Bring `output.text` up to date: text is only made when it is read."""
        try:
            self._decode(len(self.output.token_ids))
        except Exception as error:  # raised by the tokenizer library: end this completion alone
            self._detokenizer = None
            self.fail(f"{type(error).__name__}: {error}")
        shown = len(self._text) if self.finished else max(len(self._text) - self._holdback, 0)
        self.output.text = self._text[:shown]
