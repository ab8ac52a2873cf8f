"""Events of a chat's completions, apart from any API's wire format: reasoning, content, tool calls and the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_jax.serve.answers.jobs import Job
from dflash_jax.serve.engine_link.link_messages import CompletionDelta
from dflash_jax.text.parsing import END_THINK, TOOL_CALL, Delta, OutputParser
from dflash_jax.text.tokenizer import Detokenizer, Tokenizer

LONGEST_TAG = max(len(END_THINK), len(TOOL_CALL))  # characters


@dataclass(frozen=True, slots=True)
class ChatEvent:
    """The meaning of one delta of a completion.

    Attributes:
        deltas: pieces of reasoning, content and tool calls, in the order of the text; often none, since a piece
            leaves when it is certain what it is.
        finish_reason: OpenAI's; "tool_calls" where the model has chosen to call tools. None while it runs.
    """

    deltas: list[Delta]
    finish_reason: str | None


class ChatEvents:
    """Reads the deltas of one completion of a chat as events.

    Args:
        parser: fresh, for this completion.
        job: gets the number of reasoning tokens when the completion ends.
        reasoning: counts the tokens of reasoning; None if reasoning is not separated.
        parallel_tool_calls: False keeps the first tool call alone.
        include_reasoning: False drops the reasoning.
        is_tool_forced: whether the request has named the tool to call; then "stop" stays the finish reason.
    """

    def __init__(
        self,
        parser: OutputParser,
        job: Job,
        reasoning: ReasoningCount | None,
        *,
        parallel_tool_calls: bool,
        include_reasoning: bool,
        is_tool_forced: bool,
    ):
        self._parser, self._job, self._reasoning = parser, job, reasoning
        self._parallel_tool_calls, self._include_reasoning = parallel_tool_calls, include_reasoning
        self._is_tool_forced = is_tool_forced
        self._call: int | None = None  # index of the one call that is kept, where only one may be

    def read(self, completion: CompletionDelta) -> ChatEvent:
        """The event of the completion's next delta."""
        has_ended = completion.finish_reason is not None
        deltas = self._parser.push(completion.text)
        if has_ended:
            deltas += self._parser.finish(is_whole=completion.finish_reason == "stop")
        if self._reasoning is not None:
            self._reasoning.take(completion, deltas)
            if has_ended:
                self._job.num_reasoning_tokens += self._reasoning.number
        if not self._parallel_tool_calls:
            deltas = [delta for delta in deltas if self._is_kept(delta)]
        if not self._include_reasoning:
            deltas = [delta for delta in deltas if delta.reasoning is None]
        reason = completion.finish_reason
        if reason == "stop" and self._parser.has_tool_calls and not self._is_tool_forced:
            reason = "tool_calls"
        return ChatEvent(deltas, reason)

    def _is_kept(self, delta: Delta) -> bool:
        """Whether a piece does not belong to a second call; a retracted call does not count."""
        call = delta.tool_call
        if call is None:
            return True
        if self._call is None:
            self._call = call.index
        is_kept = call.index == self._call
        if is_kept and call.retracted:
            self._call = None
        return is_kept


class ReasoningCount:
    """Counts the tokens of a completion up to the end of its reasoning, tags included.

    The end is looked for in the text, since not every vocabulary has a token for it. Reasoning that is never closed
    ends before the first tool call.

    Attributes:
        number: tokens of reasoning so far; 0 while no reasoning has come.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=False)
        self._tail = ""
        self._num_tokens = 0
        self._num_before_call = 0  # tokens before the first tool call; until there is one, before the last of its tags
        self._has_ended = self._has_reasoning = self._has_call = False

    @property
    def number(self) -> int:
        if not self._has_reasoning:
            return 0
        return self._num_before_call if self._has_call and not self._has_ended else self._num_tokens

    def take(self, completion: CompletionDelta, deltas: Sequence[Delta]) -> None:
        """Count the tokens of a delta of the completion; `deltas` are what the parser made of its text."""
        self._has_reasoning |= any(delta.reasoning for delta in deltas)
        for token_id in completion.token_ids if not self._has_ended else ():
            text = self._tail + self._detokenizer.push(token_id)
            if TOOL_CALL in text and not self._has_call:
                self._num_before_call = self._num_tokens
                text = text.rpartition(TOOL_CALL)[2]
            self._num_tokens += 1
            if END_THINK in text:
                self._has_ended = True
                break
            self._tail = text[1 - LONGEST_TAG :]
        for delta in deltas:
            if delta.tool_call is not None:
                self._has_call = not delta.tool_call.retracted
