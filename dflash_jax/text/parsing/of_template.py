"""Which parsers read the answers of a model, by what its chat template writes."""

from __future__ import annotations

from typing import NamedTuple

from dflash_jax.text.parsing.output_parser import THINK


class Parsers(NamedTuple):
    """Names of parsers for answers; None where there is nothing to read.

    Attributes:
        reasoning: of reasoning.
        tools: of tool calls.
    """

    reasoning: str | None
    tools: str | None


def parsers_of(template: str | None) -> Parsers:
    """The parsers that fit a chat template.

    A template writes earlier turns as the model writes its own: calls in the XML of Qwen3-Coder, in Hermes' JSON, or
    not at all. A model whose template takes no tools may still be asked for a call in the prompt: then it is Hermes'.

    Args:
        template: source of the chat template; None if the model has none.
    """
    if template is None:
        return Parsers(None, None)
    return Parsers(
        reasoning="qwen3" if THINK in template or "enable_thinking" in template else None,
        tools="qwen3_coder" if "<function=" in template else "hermes",
    )


def takes_tools(template: str | None) -> bool:
    """Whether a template writes the tools of a request into the prompt."""
    return template is not None and "tools" in template
