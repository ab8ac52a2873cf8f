"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from dflash_jax.serve.protocol.base import UNSUPPORTED, Integer, Prompts
from dflash_jax.serve.protocol.errors import APIError
from dflash_jax.serve.protocol.sampling import SamplingBody

DEFAULT_MAX_TOKENS = 16  # tokens of a completion; OpenAI's default


class CompletionRequest(SamplingBody):
    """The body of a completion of one or several prompts."""

    unsupported: ClassVar[Mapping[str, str]] = UNSUPPORTED | {
        "suffix": "leave it out, nothing can be put before an end that is given",
    }

    prompt: Prompts
    max_tokens: Integer = Field(DEFAULT_MAX_TOKENS, description="0 only with echo: nothing but the prompt comes back.")
    logprobs: Integer | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            message = "max_tokens=0 needs echo=true: nothing would come back; set it, or raise max_tokens."
            raise APIError(message, param="max_tokens")
        return self

    @property
    def is_echo_only(self) -> bool:
        """Whether the request asks for the prompt alone. The engine still makes one token, which is not shown."""
        return self.max_tokens == 0

    def sampling_fields(self) -> dict[str, Any]:
        """Fields of `SamplingParams`; an echoed prompt gets as many log-probabilities as the completion."""
        fields = super().sampling_fields()
        if self.echo and fields["prompt_logprobs"] is None:
            fields["prompt_logprobs"] = self.logprobs
        return fields | {"max_tokens": self.max_tokens or 1, "logprobs": self.logprobs}
