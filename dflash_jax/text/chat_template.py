"""A chat template, and what it is given so that a conversation is rendered as its author meant.

Templates differ in what they take, and most refuse or drop what they do not know. What one takes is found by asking it:
by rendering a probe, or by looking for a name in its source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

# The order in which Qwen's and OpenAI's examples write a tool; other keys follow, sorted.
_FIRST_KEYS = ("type", "function", "name", "description", "parameters", "properties", "required")
_RANKS = {key: rank for rank, key in enumerate(_FIRST_KEYS)}
# What Qwen's own API makes of efforts that its templates refuse.
_EFFORT_ALIASES = {"minimal": "low", "high": "xhigh", "max": "xhigh"}
_PROBE = ("first probe", "second probe")
# Put before a template that may refuse late system messages. Templates visit messages in their order, so that the n-th
# such refusal is about the n-th of `late_system_turns`, which is written in its place. Other refusals stand.
_LATE_SYSTEM_TURNS = """
{%- set really_raise_exception = raise_exception %}
{%- set late_system = namespace(number=0) %}
{%- macro raise_exception(reason) %}
    {%- set is_late = 'system message must be at the beginning' in reason | lower %}
    {%- if is_late and late_system.number < late_system_turns | length %}
        {{- late_system_turns[late_system.number] }}
        {%- set late_system.number = late_system.number + 1 %}
    {%- else %}
        {{- really_raise_exception(reason) }}
    {%- endif %}
{%- endmacro %}
{{- '' }}"""


class ChatTemplate:
    """A template of transformers' dialect of Jinja.

    Args:
        source: of the template.
        apply: transformers' `apply_chat_template` of a tokenizer.
    """

    def __init__(self, source: str, apply: Callable[..., Any]):
        self._source, self._apply = source, apply

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str:
        """The text that the template makes of a conversation.

        - `developer` is `system` where the template does not name that role.
        - A system message behind the first one becomes a turn at its place, even if the template would refuse it, as
          those of Qwen3.5 to 3.8 do. Merging it with the first would change the prompt's beginning with every one.
        - Parts of text are joined by newlines where the template reads strings alone.
        - The keys of tools have one order, whatever order the client's JSON has, so that equal tools share a prefix.
        - `reasoning_effort` "none" turns `enable_thinking` off where the template knows it. Efforts that a template
          does not name become the nearest that it names.

        Args:
            messages: in OpenAI's form; their content is text or a list of parts.
            variables: further variables of the template.
            add_generation_prompt: whether the text ends where the assistant begins to speak.

        Raises:
            Exception: whatever the template raises.
        """
        chat = [self._message(message) for message in messages]
        fitted = self._variables(variables)
        late = [message for message in chat[1:] if message.get("role") == "system"]
        if not late or "<|im_start|>" not in self._source:
            return self._text(self._source, chat, add_generation_prompt, fitted)
        fitted["late_system_turns"] = [_turn(message) for message in late]
        return self._text(_LATE_SYSTEM_TURNS + self._source, chat, add_generation_prompt, fitted)

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template writes the texts of a list of parts, and nothing of their form."""
        parts = [{"type": "text", "text": text} for text in _PROBE]
        try:
            text = self._text(self._source, [{"role": "user", "content": parts}], False, {})
        except Exception:  # it may raise anything, and then joined text is what is left
            return False
        return all(part in text for part in _PROBE) and "'text'" not in text and '"text"' not in text

    def _names(self, value: str) -> bool:
        return f"'{value}'" in self._source or f'"{value}"' in self._source

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        fitted = dict(message)
        if fitted.get("role") == "developer" and not self._names("developer"):
            fitted["role"] = "system"
        content = fitted.get("content")
        if isinstance(content, list) and all(_is_text(part) for part in content) and not self._reads_parts:
            fitted["content"] = "\n".join(part["text"] for part in content)
        return fitted

    def _variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        fitted = dict(variables)
        effort = fitted.get("reasoning_effort")
        if effort == "none" and "enable_thinking" in self._source:
            del fitted["reasoning_effort"]
            fitted.setdefault("enable_thinking", False)
        alias = _EFFORT_ALIASES.get(effort) if isinstance(effort, str) else None
        if alias is not None and self._names(alias) and not self._names(str(effort)):
            fitted["reasoning_effort"] = alias
        if isinstance(fitted.get("tools"), list):
            fitted["tools"] = [_ordered(tool) for tool in fitted["tools"]]
        return fitted

    def _text(
        self, source: str, chat: list[dict[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        options = {"chat_template": source, "add_generation_prompt": add_generation_prompt, "tokenize": False}
        return str(self._apply(chat, **options, **variables))


def _turn(message: Mapping[str, Any]) -> str:
    """A system message as a turn of its own, in ChatML."""
    return f"<|im_start|>system\n{_plain(message.get('content')).strip()}<|im_end|>\n"


def _plain(content: Any) -> str:
    """The text of a content, its parts joined as templates that read parts join them."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if _is_text(part))
    return content or ""


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _ordered(value: Any) -> Any:
    """A JSON value whose objects have their keys in one order; lists keep theirs."""
    if isinstance(value, Mapping):
        keys = sorted(value, key=lambda key: (_RANKS.get(key, len(_RANKS)), key))
        return {key: _ordered(value[key]) for key in keys}
    return [_ordered(element) for element in value] if isinstance(value, list) else value
