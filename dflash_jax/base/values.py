"""What the public API takes: prompts and parameters. Imports nothing of this package but the errors."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeGuard

from dflash_jax.base.errors import RequestError

MOST_COMPLETIONS = 16_384  # completions of one prompt: vLLM's limit
MOST_LOGPROBS = 20  # alternatives to a token: vLLM's --max-logprobs
SEED_LIMIT = 2**64  # seeds are the two 32-bit words of a threefry key


class TextPrompt(TypedDict):
    """A text prompt; `cache_salt` as in `TokensPrompt`."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A tokenised prompt. Only prompts of the same `cache_salt` share pages of the prefix cache."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


Prompt = str | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What the text must look like; exactly one of these. Names are vLLM's.

    Attributes:
        json: a JSON schema, as a dict or as text; kept as text.
        regex: a regular expression that the whole text matches (Rust's syntax: no look-around).
        choice: the text is one of these strings.
        grammar: a grammar, in Lark's syntax (`start: ...`) or llama.cpp's GBNF (`root ::= ...`).
        json_object: True: the text is any JSON object.

    Raises:
        RequestError: none or several are given, or one has the wrong type. That a schema, expression or grammar can
            be served is checked by `dflash_jax.engine.host.constraints`.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        names = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(names) != 1:
            raise RequestError(
                f"structured_outputs holds {' and '.join(names) or 'nothing'}: give exactly one of "
                f"{', '.join(f.name for f in fields(self))}."
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _as_tuple(self.choice))
        _check(self, _STRUCTURES)

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return next(f.name for f in fields(self) if getattr(self, f.name) is not None)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to turn the target's logits into tokens. Names and defaults are vLLM's.

    Attributes:
        n: completions per prompt; completion i of a seeded request uses seed + i.
        presence_penalty: taken from the logits of tokens that the output holds, in [-2, 2].
        frequency_penalty: taken from a token's logit once for each time the output holds it, in [-2, 2].
        repetition_penalty: logits of tokens of prompt and output are divided by it where positive, multiplied where
            negative; above 0, and 1 leaves them alone.
        temperature: 0 is greedy.
        top_p: keep the likeliest tokens whose probabilities sum to at least this, in (0, 1].
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this fraction of the likeliest, in [0, 1].
        seed: with it, the same request gives the same tokens, with or without a drafter.
        stop: strings that end the text; the text is cut before them.
        stop_token_ids: tokens that end the output; they stay in `token_ids`.
        bad_words: words that the output must not hold: the last token of one is ruled out after its other tokens.
        logit_bias: what to add to the logits of tokens, each in [-100, 100]; ids may be strings, as JSON has them.
            Kept as pairs in the order of the ids.
        allowed_token_ids: the only tokens that may be chosen; None allows all.
        structured_outputs: what the text must look like.
        reasoning_token_ids: (start, end) of reasoning that `structured_outputs` leaves alone: it may begin the output,
            and what follows its end must obey. Start None: the prompt has begun it.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: do not end at the model's end-of-sequence tokens.
        max_tokens: most tokens to emit; None means up to `max_model_len`.
        min_tokens: tokens to emit before an end-of-sequence or stop token may be chosen.
        logprobs: log-probabilities of each emitted token and of this many likeliest alternatives, at most 20.
        prompt_logprobs: the same of each token of the prompt but the first.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: make text of the tokens; without it, outputs have token ids alone and cost the host less.
        speculation: False decodes without the drafter, one token a round; beside requests that use it, it rides along.

    Raises:
        RequestError: a value is outside its range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: str | Sequence[str] = ()
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    reasoning_token_ids: tuple[int | None, int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    speculation: bool = True

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        for name in ("allowed_token_ids", "reasoning_token_ids"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        _check(self, _SAMPLING)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}: lower the one or raise the other."
            )


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an integer (numpy's included) and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _as_tuple(value: object) -> tuple:
    """The items of a list, or a single value as a tuple of one."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else (value,)


def _is_real(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: object) -> bool:
    """Whether a value is a non-empty string that UTF-8 can encode, so without surrogates."""
    return isinstance(value, str) and bool(value) and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_token(value: object) -> bool:
    return is_int(value) and value >= 0


def _schema_text(schema: object) -> str:
    """A JSON schema as text; its keys keep their order, since it is the order of the properties."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(parsed, Mapping):
            return json.dumps(dict(parsed), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.json is not JSON ({error}); correct the schema.") from error
    raise RequestError(f"structured_outputs.json of type {type(parsed).__name__} is no schema; give an object.")


def _bias_pairs(bias: Any) -> tuple[tuple[Any, Any], ...]:
    """Pairs of token id and bias in the order of the ids, from a mapping or pairs; strings of digits become ids."""
    try:
        listed = dict(bias or ())
        pairs = {int(k) if isinstance(k, str) and k.isdecimal() else k: listed[k] for k in listed}
        return tuple(sorted(pairs.items()))
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"logit_bias={reprlib.repr(bias)} is not allowed: it must be a mapping of token ids to numbers."
        ) from error


class _Allowed(NamedTuple):
    """The allowed values of a field, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def _integer(least: int, most: int | None = None) -> _Allowed:
    words = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    return _Allowed(words, lambda v: is_int(v) and v >= least and (most is None or v <= most))


def _number(words: str, holds: Callable[[float], bool]) -> _Allowed:
    return _Allowed(words, lambda v: _is_real(v) and holds(v))


def _every(words: str, holds: Callable[[Any], bool]) -> _Allowed:
    return _Allowed(words, lambda values: all(map(holds, values)))


def _optional(allowed: _Allowed) -> _Allowed:
    return _Allowed(f"None or {allowed.words}", lambda v: v is None or allowed.holds(v))


_BOOLEAN = _Allowed("True or False", lambda v: isinstance(v, bool))
_TOKENS = _every("token ids of at least 0", _is_token)
_TEXTS = _every("non-empty strings", _is_text)

_SAMPLING = {
    "n": _integer(1, MOST_COMPLETIONS),
    "presence_penalty": _number("in [-2, 2]", lambda v: -2 <= v <= 2),
    "frequency_penalty": _number("in [-2, 2]", lambda v: -2 <= v <= 2),
    "repetition_penalty": _number("a finite number above 0", lambda v: v > 0),
    "temperature": _number("a finite number of at least 0", lambda v: v >= 0),
    "top_p": _number("in (0, 1]", lambda v: 0 < v <= 1),
    "top_k": _Allowed("an integer of at least -1 (0 and -1: all)", lambda v: is_int(v) and v >= -1),
    "min_p": _number("in [0, 1]", lambda v: 0 <= v <= 1),
    "seed": _Allowed("None or an integer of 64 bits", lambda v: v is None or (is_int(v) and abs(v) < SEED_LIMIT // 2)),
    "stop": _TEXTS,
    "stop_token_ids": _TOKENS,
    "bad_words": _TEXTS,
    "logit_bias": _every(
        "token ids of at least 0 with numbers in [-100, 100]",
        lambda pair: _is_token(pair[0]) and _is_real(pair[1]) and -100 <= pair[1] <= 100,
    ),
    "allowed_token_ids": _Allowed(
        "None or a list of at least one token id", lambda v: v is None or (len(v) > 0 and _TOKENS.holds(v))
    ),
    "structured_outputs": _Allowed(
        "None or a StructuredOutputsParams", lambda v: v is None or isinstance(v, StructuredOutputsParams)
    ),
    "reasoning_token_ids": _Allowed(
        "None or a pair of token ids, of which the first may be None",
        lambda v: v is None or (len(v) == 2 and (v[0] is None or _is_token(v[0])) and _is_token(v[1])),
    ),
    "include_stop_str_in_output": _BOOLEAN,
    "ignore_eos": _BOOLEAN,
    "max_tokens": _optional(_integer(1)),
    "min_tokens": _integer(0),
    "logprobs": _optional(_integer(0, MOST_LOGPROBS)),
    "prompt_logprobs": _optional(_integer(0, MOST_LOGPROBS)),
    "skip_special_tokens": _BOOLEAN,
    "detokenize": _BOOLEAN,
    "speculation": _BOOLEAN,
}
_STRUCTURES = {
    "regex": _optional(_Allowed("a non-empty string", _is_text)),
    "choice": _Allowed(
        "None or a list of at least one non-empty string", lambda v: v is None or (len(v) > 0 and _TEXTS.holds(v))
    ),
    "grammar": _optional(_Allowed("a non-empty string", _is_text)),
    "json_object": _Allowed("None or True", lambda v: v is None or v is True),
}


def _check(params: object, allowed: Mapping[str, _Allowed]) -> None:
    """Raise RequestError for the first field whose value is not allowed."""
    for name, (words, holds) in allowed.items():
        value = getattr(params, name)
        if not holds(value):
            raise RequestError(f"{name}={reprlib.repr(value)} is not allowed: it must be {words}.")
