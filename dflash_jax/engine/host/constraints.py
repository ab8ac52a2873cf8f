"""Grammars and bad words, as masks of allowed tokens for each row of a block. Pure host code.

A mask has one bit a token: bit v % 32 of word v // 32 is set where token v is allowed. Of a block's G rows, row 0
follows the text so far, and row j the text so far and the first j drafts, so that a round is masked exactly as if its
tokens came one by one. Rows behind a forbidden draft may hold anything, since no token is taken from them.
"""

from __future__ import annotations

import json
import textwrap
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import takewhile
from typing import TypeVar

import numpy as np
from jaxtyping import UInt32
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

from dflash_jax.base.errors import RequestError
from dflash_jax.base.values import SamplingParams, StructuredOutputsParams
from dflash_jax.engine.host.json_schema import json_grammar
from dflash_jax.text.tokenizer import Tokenizer

MOST_COMPILED = 64  # compiled grammars that are kept for later requests
LARGEST_KEPT = 16_384  # characters of the largest grammar that is kept
LONGEST_GRAMMAR = 65_536  # characters; time and memory of a regular expression may grow with their square
DEEP_STACK = 256 * 1024**2  # bytes of a compiling thread's stack; only those in use take memory
LONGEST_REASON = 200  # characters of llguidance's messages, which may quote the whole grammar

Result = TypeVar("Result")
Rows = UInt32[np.ndarray, "G words"]


@dataclass(eq=False, slots=True)
class Constraint:
    """Which tokens may follow in one sequence; advances with the emitted tokens."""

    grammar: GrammarConstraint | None
    bad_words: BadWords | None

    @property
    def is_complete(self) -> bool:
        """Whether only the end may follow."""
        return self.grammar is not None and self.grammar.is_complete

    @property
    def error(self) -> str | None:
        """Why the sequence cannot go on; None while it can."""
        return None if self.grammar is None else self.grammar.error

    def fill(self, rows: Rows, drafts: Sequence[int]) -> None:
        """Clear, in every row j of rows [G, ceil(V / 32)], the tokens that may not follow the text and drafts[:j]."""
        fill_masks([(self, rows, drafts)])

    def accept(self, tokens: Iterable[int]) -> None:
        """Advance by emitted tokens."""
        for part in (self.grammar, self.bad_words):
            if part is not None:
                part.accept(tokens)


def fill_masks(batch: Sequence[tuple[Constraint, Rows, Sequence[int]]]) -> None:
    """`Constraint.fill` for many sequences in one call: their grammars run in parallel, outside Python's lock."""
    _fill_grammars([(c.grammar, rows, drafts) for c, rows, drafts in batch if c.grammar is not None])
    for constraint, rows, drafts in batch:
        if constraint.bad_words is not None:  # after the grammars, which take precedence
            constraint.bad_words.fill(rows, drafts)


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that masks cover.

    Attributes:
        size: V, tokens of the model.
        num_tokens: tokens of llguidance's masks: those of the model or of the tokenizer, whichever are more.
        end: the token that ends a text for llguidance; a special token, so that it has no text.
        other_ends: other tokens that end a text. The tokenizer may have text for them, but a grammar never allows them
            inside, where they would end the sequence.
    """

    size: int
    num_tokens: int
    end: int
    other_ends: tuple[int, ...]

    def read(self, token: int) -> int:
        """The token that llguidance sees: `end` in place of any token that ends a text."""
        return self.end if token in self.other_ends else token

    def masks_of_model(self, masks: UInt32[np.ndarray, "G wide"]) -> Rows:
        """Turn llguidance's masks over all tokens into masks over the model's tokens, in place, and cut them."""
        may_end = masks[:, self.end // 32] >> np.uint32(self.end % 32) & np.uint32(1)
        for word, bit in (divmod(end, 32) for end in self.other_ends):
            masks[:, word] &= ~np.uint32(1 << bit)
            masks[:, word] |= may_end << np.uint32(bit)
        last_word, last_bit = divmod(self.size - 1, 32)
        masks[:, last_word] &= np.uint32((2 << last_bit) - 1)
        return masks[:, : last_word + 1]


class GrammarConstraint:
    """The state of a grammar in one text.

    Args:
        matcher: the grammar's matcher, at the beginning of the text.
        vocabulary: tokens of matcher and model.
        reasoning: `SamplingParams.reasoning_token_ids`; the grammar does not see what lies between.
    """

    def __init__(
        self, matcher: LLMatcher, vocabulary: Vocabulary, reasoning: tuple[int | None, int] | None = None
    ) -> None:
        self.matcher = matcher
        self.vocabulary = vocabulary
        self._opens: int | None
        self._closes: int | None
        self._opens, self._closes = reasoning or (None, None)
        self._is_open = reasoning is not None and self._opens is None  # whether the text so far ends in reasoning

    @property
    def is_complete(self) -> bool:
        """Whether only the end may follow."""
        return not self._is_open and self.matcher.is_stopped()

    def ruled(self, rows: Rows, drafts: list[int]) -> list[tuple[Rows, list[int]]]:
        """The parts of a block's rows that the grammar masks, each with its drafts; the other rows are reasoning."""
        if self._is_open:
            return self._behind_reasoning(rows, drafts)
        if self._opens is not None and drafts[:1] == [self._opens]:
            return [(rows[:1], []), *self._behind_reasoning(rows[1:], drafts[1:])]
        return [(rows, drafts)]

    def _behind_reasoning(self, rows: Rows, drafts: list[int]) -> list[tuple[Rows, list[int]]]:
        if self._closes not in drafts:
            return []
        first = drafts.index(self._closes) + 1  # a row: there are more rows than drafts
        return [(rows[first:], drafts[first:])]

    def let_open(self, row: Rows) -> None:
        """Allow the token that begins reasoning in the first row of a block, if reasoning may begin there."""
        if self._opens is not None:
            row[self._opens // 32] |= np.uint32(1 << self._opens % 32)

    @property
    def error(self) -> str | None:
        """What went wrong: a token that the grammar forbids, or a text too ambiguous to follow; None if nothing."""
        return _shorten(self.matcher.get_error()) if self.matcher.is_error() else None

    def accept(self, tokens: Iterable[int]) -> None:
        """Advance by emitted tokens; those after the end are ignored."""
        for token in tokens:
            if self.is_complete:
                return
            opens, self._opens = self._opens, None
            if self._is_open or token == opens:
                self._is_open = token != self._closes
                continue
            self.matcher.consume_token(self.vocabulary.read(token))


class BadWords:
    """Words that the output must not contain, as in vLLM: the last token of a word may not follow its other tokens.

    Args:
        words: tokens of each word, at least one.
    """

    def __init__(self, words: Iterable[tuple[int, ...]]):
        self._last: dict[tuple[int, ...], list[int]] = {}  # tokens that must not follow these
        for *others, last in words:
            self._last.setdefault(tuple(others), []).append(last)
        self._lengths = sorted({len(others) for others in self._last})
        self._tail: list[int] = []  # last tokens of the output, as many as a word may have before its last

    def accept(self, tokens: Iterable[int]) -> None:
        """Advance by emitted tokens."""
        self._tail = [*self._tail, *tokens][-max(self._lengths[-1], 1) :]

    def fill(self, rows: Rows, drafts: Sequence[int]) -> None:
        """Clear the tokens that would complete a word, in rows where other tokens remain.

        A row must allow some token, so where a grammar allows nothing but bad words, they stay: a text of the wanted
        form is of more use than one that breaks off.
        """
        text = [*self._tail, *drafts]
        for row, end in zip(rows, range(len(self._tail), len(text) + 1), strict=False):
            lasts = [self._last.get(tuple(text[end - n : end]), ()) for n in self._lengths if n <= end]
            bad = np.array([token for last in lasts for token in last], np.int64)
            masked = row.copy()
            np.bitwise_and.at(masked, bad // 32, ~(np.uint32(1) << (bad % 32).astype(np.uint32)))
            if masked.any():
                row[:] = masked


class Constraints:
    """Makes the constraints that requests ask for, on one model.

    Args:
        tokenizer: tokenizer of the model.
        vocab_size: V of the model; the tokenizer may have fewer tokens or more.
        eos_token_ids: tokens that end a text; each is allowed wherever a grammar may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._matcher = lru_cache(MOST_COMPILED)(self._compile)

    def of(self, params: SamplingParams) -> Constraint | None:
        """The constraint of one completion; None if the parameters ask for none.

        Raises:
            RequestError: a schema, expression or grammar cannot be served, or a bad word has no tokens.
        """
        grammar = bad_words = None
        if params.structured_outputs is not None:
            # A large matcher may take hundreds of megabytes: it is compiled again rather than kept.
            is_small = _size(params.structured_outputs) <= LARGEST_KEPT
            matcher = (self._matcher if is_small else self._compile)(params.structured_outputs)
            grammar = GrammarConstraint(matcher.deep_copy(), self._vocabulary, params.reasoning_token_ids)
        if words := self._bad_word_tokens(params.bad_words):
            bad_words = BadWords(words)
        return None if grammar is bad_words is None else Constraint(grammar, bad_words)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        special = set(self._tokenizer.hf.all_special_ids)
        ends = sorted(self._eos_token_ids, key=lambda token: token not in special)
        if not ends or ends[0] not in special:
            raise RequestError(
                f"structured_outputs cannot be served (the model has no special end-of-sequence token among {ends}); "
                "leave it out."
            )
        return Vocabulary(self._vocab_size, max(self._vocab_size, len(self._tokenizer.hf)), ends[0], tuple(ends[1:]))

    @cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        """The tokenizer in llguidance's form, built with the first grammar, since it takes a second."""
        from llguidance.hf import from_tokenizer  # imports transformers, which `import dflash_jax` must not

        vocabulary = self._vocabulary
        try:
            return from_tokenizer(self._tokenizer.hf, n_vocab=vocabulary.num_tokens, eos_token=vocabulary.end)
        except ValueError as error:
            raise RequestError(
                f"structured_outputs cannot be served with this model's tokenizer ({_shorten(str(error))}); "
                "leave it out."
            ) from error

    def _compile(self, structured: StructuredOutputsParams) -> LLMatcher:
        """Compile a grammar into a matcher at the beginning of a text."""
        kind, size = structured.kind, _size(structured)
        if size > LONGEST_GRAMMAR:
            raise RequestError(
                f"structured_outputs.{kind} has {size} characters, and at most {LONGEST_GRAMMAR} are allowed; "
                "ask for something simpler."
            )
        tokenizer = self._ll_tokenizer
        try:
            matcher = _on_deep_stack(lambda: _new_matcher(tokenizer, structured))
            first = np.frombuffer(matcher.compute_bitmask(), np.uint32)[None].copy()
            begins = self._vocabulary.masks_of_model(first).any()
            reason = matcher.get_error() if matcher.is_error() else "" if begins else "it allows no text"
        except Exception as error:  # llguidance's reader of GBNF may raise anything
            reason = str(error) or type(error).__name__
        if reason:
            raise RequestError(f"structured_outputs.{kind} cannot be served ({_shorten(reason)}); correct it.")
        return matcher

    def _bad_word_tokens(self, bad_words: Iterable[str]) -> list[tuple[int, ...]]:
        """The tokens of words, at the beginning of a text and after a space.

        As in vLLM, the form with a space counts only where the space is part of another first token.
        """
        words = []
        for word in bad_words:
            plain, spaced = (
                self._tokenizer.hf.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " ")
            )
            if not plain:
                raise RequestError(f"bad_words holds {word!r}, which has no tokens; leave it out.")
            words.append(plain)
            if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
                words.append(spaced)
        # The tokenizer may know tokens for which the model has no logits.
        return [tuple(word) for word in words if max(word) < self._vocab_size]


def _size(structured: StructuredOutputsParams) -> int:
    """Characters of a grammar; each text of a choice counts five more, for quotes and bar."""
    grammar = getattr(structured, structured.kind)
    return len(grammar) if isinstance(grammar, str) else sum(len(text) + 5 for text in structured.choice or ())


def _new_matcher(tokenizer: LLTokenizer, structured: StructuredOutputsParams) -> LLMatcher:
    # Verbose errors would quote the grammar and the text, which must not reach logs.
    limits = LLParserLimits(verbose_errors=False)
    return LLMatcher(tokenizer, llguidance_grammar(structured), log_level=0, limits=limits)


def _on_deep_stack(function: Callable[[], Result]) -> Result:
    """Call a function that recurses as deep as the rules of a grammar nest, in a thread with a stack for it.

    A stack overflow ends the process, and 3000 rules overflow the usual stack of a thread.
    """
    usual = threading.stack_size(DEEP_STACK)
    try:
        executor = ThreadPoolExecutor(1)
        result = executor.submit(function)  # starts the thread
    finally:
        threading.stack_size(usual)
    with executor:
        return result.result()


def llguidance_grammar(structured: StructuredOutputsParams) -> str:
    """The grammar in llguidance's form, not checked yet."""
    grammar = getattr(structured, structured.kind)
    match structured.kind:
        case "json":
            return json_grammar(grammar)
        case "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"})
        case "regex":
            return LLMatcher.grammar_from_regex(grammar)
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in grammar))
        case _:
            return LLMatcher.grammar_from_lark(any_to_lark(grammar))


def _fill_grammars(batch: Sequence[tuple[GrammarConstraint, Rows, Sequence[int]]]) -> None:
    if not batch:
        return
    num_tokens = batch[0][0].vocabulary.num_tokens
    masks = np.full((sum(len(rows) for _, rows, _ in batch), -(-num_tokens // 32)), 0xFFFFFFFF, np.uint32)
    with_drafts, without, filled = [], [], []
    start = 0
    for grammar, rows, drafts in batch:
        for number, (ruled, behind) in enumerate(grammar.ruled(rows, list(drafts[: len(rows) - 1]))):
            # An id that is no token would break the matcher for good; rows behind it are not needed.
            known = [*takewhile(lambda d: 0 <= d < num_tokens, behind)]
            matcher = grammar.matcher.deep_copy() if number else grammar.matcher  # one call may use a matcher once
            if known:
                with_drafts.append((matcher, start, known))
            else:
                without.append((matcher, start))
            filled.append((grammar, ruled, masks[start : start + len(ruled)], number == 0))
            start += len(ruled)
    if with_drafts:  # llguidance refuses empty lists, of drafts and of sequences
        fill_next_token_bitmask_par_with_draft_tokens(_executor(), with_drafts, masks.view(np.int32))
    if without:
        fill_next_token_bitmask_par(_executor(), without, masks.view(np.int32))
    for grammar, ruled, mask, is_first in filled:
        allowed = grammar.vocabulary.masks_of_model(mask)
        if is_first:
            grammar.let_open(allowed[0])
        ruled &= allowed


@cache
def _executor() -> LLExecutor:
    """The threads that fill masks."""
    return LLExecutor()


def _shorten(reason: str) -> str:
    return textwrap.shorten(reason.replace("<non-verbose/>", ""), LONGEST_REASON, placeholder=" ...")
