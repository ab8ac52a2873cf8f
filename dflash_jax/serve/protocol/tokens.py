"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from pydantic import Field, model_validator

from dflash_jax.serve.protocol.base import RequestBody, Text, TokenIds
from dflash_jax.serve.protocol.chat import ConversationBody, Messages
from dflash_jax.serve.protocol.errors import APIError


class TokenizeRequest(ConversationBody):
    """A text, or a chat, to turn into token ids."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for messages.")
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            subject = "neither prompt nor messages is" if self.prompt is None else "both prompt and messages are"
            raise APIError(f"{subject} given: give one of them.", param="prompt")
        return self


class DetokenizeRequest(RequestBody):
    """Token ids to turn into text."""

    model: Text | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False
