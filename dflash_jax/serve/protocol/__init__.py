"""From JSON to our own types: the bodies of requests, what they ask for, and errors as clients read them.

The package knows no web framework. A body becomes a request by `parse`, or by FastAPI. Validators may raise `APIError`;
FastAPI's handlers turn it, and every other exception, into an answer with `of_exception`.
"""

from dflash_jax.serve.protocol.anthropic import CountTokensRequest, MessagesRequest, anthropic_error_body
from dflash_jax.serve.protocol.base import RequestBody, parse, unknown_fields
from dflash_jax.serve.protocol.chat import ChatCompletionRequest
from dflash_jax.serve.protocol.completion import CompletionRequest
from dflash_jax.serve.protocol.errors import APIError, error_body, of_exception, validation_error
from dflash_jax.serve.protocol.generate import GenerateRequest
from dflash_jax.serve.protocol.params import (
    Limits,
    completion_prompts,
    fit_prompt,
    generate_sampling_params,
    prompt_too_long,
    sampling_params,
)
from dflash_jax.serve.protocol.responses import ResponsesRequest
from dflash_jax.serve.protocol.sampling import StreamOptions
from dflash_jax.serve.protocol.tokens import DetokenizeRequest, TokenizeRequest

__all__ = [
    "APIError",
    "ChatCompletionRequest",
    "CompletionRequest",
    "CountTokensRequest",
    "DetokenizeRequest",
    "GenerateRequest",
    "Limits",
    "MessagesRequest",
    "RequestBody",
    "ResponsesRequest",
    "StreamOptions",
    "TokenizeRequest",
    "anthropic_error_body",
    "completion_prompts",
    "error_body",
    "fit_prompt",
    "generate_sampling_params",
    "of_exception",
    "parse",
    "prompt_too_long",
    "sampling_params",
    "unknown_fields",
    "validation_error",
]
