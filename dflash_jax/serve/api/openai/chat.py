"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from dflash_jax.serve.answers.chunks import TokenSources
from dflash_jax.serve.answers.events import ChatEvents, ReasoningCount
from dflash_jax.serve.answers.jobs import Job, follow, without_keepalives
from dflash_jax.serve.answers.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from dflash_jax.serve.answers.requests import encode, log_request, new_job, rendered_prompts, response_headers
from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.answers.usage import costs
from dflash_jax.serve.api.streams import head_of, openai_stream
from dflash_jax.serve.engine_link.link_messages import CompletionDelta
from dflash_jax.serve.http.documented import errors, streamed
from dflash_jax.serve.http.streaming import Events, EventStream, json_response, unless_left
from dflash_jax.serve.protocol import APIError, ChatCompletionRequest, TokenizeRequest, sampling_params
from dflash_jax.text.parsing import END_THINK, THINK, Delta, OutputParser, ParsedOutput, collect, prompt_reasoning
from dflash_jax.text.tokenizer import Tokenizer


@dataclass(eq=False)
class Chat:
    """A chat that is being answered; `prompt` is the text that the template made of it."""

    state: ServerState
    body: ChatCompletionRequest
    job: Job
    prompt: str

    @cached_property
    def separates_reasoning(self) -> bool:
        """Whether reasoning leaves apart from the content.

        It does not where a grammar leaves no room for reasoning: the answer then begins with the content, even if the
        template has opened reasoning.
        """
        begins, params = prompt_reasoning(self.prompt), self.job.params[0]
        has_room = params.structured_outputs is None or params.reasoning_token_ids is not None
        may_reason = begins is None or (begins and has_room)
        return bool(self.state.args.reasoning_parser) and self.body.separate_reasoning and may_reason

    def events(self, tokenizer: Tokenizer) -> ChatEvents:
        """A reader of one completion, from its beginning."""
        body, args = self.body, self.state.args
        parser = OutputParser(
            args.reasoning_parser if self.separates_reasoning else None,
            args.tool_call_parser if body.tools else None,
            starts_in_reasoning=bool(prompt_reasoning(self.prompt)),
            **body.parser_options(),
        )
        return ChatEvents(
            parser,
            self.job,
            ReasoningCount(tokenizer, self.job.prompts[0]) if self.separates_reasoning else None,
            parallel_tool_calls=body.parallel_tool_calls,
            include_reasoning=body.include_reasoning,
            is_tool_forced=body.tool_name is not None,
        )


class Choice:
    """The choice, in OpenAI's format, of one completion while it comes."""

    def __init__(self, chat: Chat):
        self._body = chat.body
        tokenizer = chat.state.renderer.need_tokenizer("a chat")
        self._events = chat.events(tokenizer)
        self._has_role = False
        self._texts = TokenTexts(tokenizer, as_ids=chat.body.return_tokens_as_token_ids)
        self._sources = TokenSources(tokenizer, chat.job.prompts[0]) if chat.body.return_token_sources else None

    def whole(self, completion: CompletionDelta) -> dict[str, Any]:
        """The choice of a completion that came in one delta."""
        event = self._events.read(completion)
        return {
            "index": completion.index,
            "message": _message(collect(event.deltas)),
            "logprobs": None,
            "finish_reason": event.finish_reason,
            "stop_reason": completion.stop_reason,
        } | self._extras(completion)

    def chunks(self, completion: CompletionDelta) -> list[dict[str, Any]]:
        """The choices of the chunks that a delta gives rise to."""
        event = self._events.read(completion)
        finish = event.finish_reason
        messages = [_message_delta(delta) for delta in event.deltas]
        extras = self._extras(completion)
        if not self._has_role:
            self._has_role = True
            messages.insert(0, {"role": "assistant", "content": ""})
        elif not messages and (finish or extras):
            messages.append({})
        choices: list[dict[str, Any]] = [
            {"index": completion.index, "delta": message, "logprobs": None, "finish_reason": None}
            for message in messages
        ]
        if choices:
            choices[-1] |= extras
        if finish is not None:
            choices[-1] |= {"finish_reason": finish, "stop_reason": completion.stop_reason}
        return choices

    def _extras(self, completion: CompletionDelta) -> dict[str, Any]:
        """The fields of a choice about its tokens."""
        extras: dict[str, Any] = {}
        if completion.logprobs is not None:
            extras["logprobs"] = chat_logprobs(completion.logprobs, self._body.top_logprobs, self._texts)
        if self._body.return_token_ids:
            extras["token_ids"] = completion.token_ids
        if self._sources is not None:
            extras["tokens"] = self._sources.of(completion)
        return extras


def chat_router(state: ServerState) -> APIRouter:
    """The endpoint of chats."""
    router = APIRouter(responses=errors())

    @router.post("/v1/chat/completions", response_model=None, summary="Answer a chat", responses=streamed())
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        chat = await new_chat(state, body, request)
        headers = response_headers(state, chat.job)
        if body.stream:
            return await EventStream.of(_stream(chat), headers)
        return await unless_left(request, _answer(chat, headers))

    @router.post("/v1/chat/completions/render", response_model=None, summary="What a chat would ask of the engine")
    async def render(body: ChatCompletionRequest, request: Request) -> Response:
        (prompt,) = rendered_prompts(state, (await new_chat(state, body, request)).job)
        return json_response(prompt)

    return router


async def new_chat(
    state: ServerState, body: ChatCompletionRequest, request: Request, prefix: str = "chatcmpl-"
) -> Chat:
    """The chat that a body asks for, rendered; the id of its answer begins with `prefix`.

    Raises:
        APIError: the request cannot be served; the error says why.
        RequestError: the model has no chat template, or it refuses the messages.
    """
    state.check_model(body.model)
    _check_tools(state, body)
    params = sampling_params(body, state.defaults, state.args.limits, state.most_tokens)
    text, token_ids = await state.render(lambda: _rendered(state, body))
    if params.structured_outputs is not None and state.args.reasoning_parser and body.separate_reasoning:
        tokenizer = state.renderer.need_tokenizer("a chat")
        params = replace(params, reasoning_token_ids=reasoning_token_ids(tokenizer, text))
    job = new_job(state, body, request, prefix, [token_ids], params)
    log_request(state, job, text)
    return Chat(state, body, job, text)


def reasoning_token_ids(tokenizer: Tokenizer, prompt: str) -> tuple[int | None, int] | None:
    """`SamplingParams.reasoning_token_ids`: the tags around the reasoning that may precede a structured output.

    None where the template has closed the reasoning, or where the tags are not tokens, which a mask could not tell.
    """
    begins = prompt_reasoning(prompt)
    opens, closes = (tokenizer.token_id(tag) for tag in (THINK, END_THINK))
    if begins is False or opens is None or closes is None:
        return None
    return None if begins else opens, closes


def chat_text(state: ServerState, body: ChatCompletionRequest | TokenizeRequest) -> str:
    """The text of the prompt that a conversation becomes.

    Raises:
        RequestError: the model has no chat template, or it refuses the messages.
    """
    return state.renderer.chat_text(
        body.messages or [],
        chat_template=state.args.chat_template,
        add_generation_prompt=body.add_generation_prompt,
        chat_template_kwargs=body.template_kwargs(state.args.default_chat_template_kwargs),
    )


def _rendered(state: ServerState, body: ChatCompletionRequest) -> tuple[str, list[int]]:
    """The prompt of a chat as text and as token ids."""
    text = chat_text(state, body)
    is_truncated = body.truncate_prompt_tokens is not None
    return text, encode(state, text, "a chat", add_special_tokens=False, is_truncated=is_truncated)


def _check_tools(state: ServerState, body: ChatCompletionRequest) -> None:
    if body.tools and body.tool_choice == "auto" and not state.args.enable_auto_tool_choice:
        raise APIError(
            '"auto" tool choice needs a parser of calls, and this server has none: start it without --tool-call-parser '
            "none, or set tool_choice to 'none', 'required' or a tool.",
            param="tool_choice",
        )


async def _answer(chat: Chat, headers: dict[str, str]) -> Response:
    choices: list[dict[str, Any]] = []
    async with aclosing(follow(chat.state, chat.job)) as deltas:
        async for _, delta in without_keepalives(deltas):
            choices += [Choice(chat).whole(completion) for completion in delta.completions]
    head = head_of(chat.state, chat.job, "chat.completion")
    answer = head | {"choices": sorted(choices, key=lambda choice: choice["index"])}
    answer |= costs(
        chat.state,
        chat.job,
        with_reasoning=chat.separates_reasoning,
        with_meta_info=chat.body.return_meta_info,
    )
    if chat.job.prompt_logprobs:
        answer["prompt_logprobs"] = prompt_logprobs(chat.job.prompt_logprobs[0])
    if chat.body.return_token_ids:
        answer["prompt_token_ids"] = chat.job.prompts[0]
    return json_response(answer, headers=headers)


def _message(parsed: ParsedOutput) -> dict[str, Any]:
    content = parsed.content
    if content is None and not (parsed.tool_calls or parsed.reasoning):
        content = ""
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if parsed.reasoning is not None:
        message |= {"reasoning": parsed.reasoning, "reasoning_content": parsed.reasoning}
    if parsed.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parsed.tool_calls
        ]
    return message


def _message_delta(delta: Delta) -> dict[str, Any]:
    if delta.reasoning is not None:
        return {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
    if delta.tool_call is None:
        return {"content": delta.content}
    call = delta.tool_call
    function = {"arguments": call.arguments} if call.name is None else {"name": call.name, "arguments": call.arguments}
    head = {} if call.id is None else {"id": call.id, "type": "function"}
    return {"tool_calls": [{"index": call.index, **head, "function": function}]}


def _stream(chat: Chat) -> Events:
    choices = [Choice(chat) for _ in range(chat.body.n)]
    only_first = {"prompt_token_ids": chat.job.prompts[0]} if chat.body.return_token_ids else {}

    def render(_prompt: int, completion: CompletionDelta) -> Iterator[dict[str, Any]]:
        nonlocal only_first
        for choice in choices[completion.index].chunks(completion):
            yield {"choices": [choice]} | only_first
            only_first = {}

    head = head_of(chat.state, chat.job, "chat.completion.chunk")
    return openai_stream(chat.state, chat.body, chat.job, head, render, with_reasoning=chat.separates_reasoning)
