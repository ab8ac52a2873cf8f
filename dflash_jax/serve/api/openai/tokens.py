"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.api.openai.chat import chat_text
from dflash_jax.serve.http.documented import errors
from dflash_jax.serve.http.streaming import json_response
from dflash_jax.serve.protocol import APIError, DetokenizeRequest, TokenizeRequest


def tokens_router(state: ServerState) -> APIRouter:
    """The endpoints of the tokenizer."""
    router = APIRouter(responses=errors())

    @router.post("/tokenize", response_model=None, summary="Token ids of a text or a chat")
    async def tokenize(body: TokenizeRequest) -> Response:
        state.check_model(body.model)
        return json_response(await state.render(lambda: _tokenized(state, body)))

    @router.post("/detokenize", response_model=None, summary="Text of token ids")
    async def detokenize(body: DetokenizeRequest) -> Response:
        state.check_model(body.model)
        tokenizer = state.renderer.need_tokenizer("detokenize")
        if beyond := [token for token in body.tokens if token >= state.ready.vocab_size]:
            raise APIError(
                f"tokens holds {beyond[0]}, not in the vocabulary: ids are 0 to {state.ready.vocab_size - 1}.",
                param="tokens",
            )
        skip = body.skip_special_tokens
        text = await state.render(lambda: tokenizer.decode(body.tokens, skip_special_tokens=skip))
        return json_response({"prompt": text})

    return router


def _tokenized(state: ServerState, body: TokenizeRequest) -> dict[str, Any]:
    tokenizer = state.renderer.need_tokenizer("tokenize")
    is_chat = body.messages is not None
    text = chat_text(state, body) if is_chat else body.prompt or ""
    special = not is_chat if body.add_special_tokens is None else body.add_special_tokens
    tokens = tokenizer.encode(text, add_special_tokens=special)
    strings = tokenizer.hf.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": state.ready.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }
