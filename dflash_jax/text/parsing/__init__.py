"""Splits the text of a completion into reasoning, content and tool calls while it is generated.

One state machine, `OutputParser`, serves streams and complete answers. The formats of tool calls are readers:
generators that are sent one character at a time, and so cannot depend on how the text was cut into chunks.
"""

from dflash_jax.text.parsing.deltas import Delta, ParsedOutput, ToolCall, ToolCallDelta, collect
from dflash_jax.text.parsing.of_template import parsers_of, takes_tools
from dflash_jax.text.parsing.output_parser import (
    END_THINK,
    REASONING_PARSERS,
    THINK,
    TOOL_PARSERS,
    OutputParser,
    prompt_reasoning,
)
from dflash_jax.text.parsing.readers import TOOL_CALL

__all__ = [
    "END_THINK",
    "REASONING_PARSERS",
    "THINK",
    "TOOL_CALL",
    "TOOL_PARSERS",
    "Delta",
    "OutputParser",
    "ParsedOutput",
    "ToolCall",
    "ToolCallDelta",
    "collect",
    "parsers_of",
    "prompt_reasoning",
    "takes_tools",
]
