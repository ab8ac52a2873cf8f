"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from dflash_jax.serve.answers.chunks import ChunkBuffer, TokenSources
from dflash_jax.serve.answers.jobs import Job, follow, without_keepalives
from dflash_jax.serve.answers.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from dflash_jax.serve.answers.requests import encode, log_request, new_job, response_headers
from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.answers.usage import costs, usage_of
from dflash_jax.serve.engine_link.link_messages import CompletionDelta, RequestDelta
from dflash_jax.serve.http.streaming import DONE, KEEP_ALIVE, Events, EventStream, event, json_response, unless_left
from dflash_jax.serve.protocol import APIError, ChatCompletionRequest, TokenizeRequest, sampling_params
from dflash_jax.text.parsing import END_THINK, THINK, Delta, OutputParser, ParsedOutput, collect, prompt_reasoning
from dflash_jax.text.tokenizer import Detokenizer, Tokenizer


@dataclass(eq=False)
class Chat:
    """A chat on its way to its answer."""

    state: ServerState
    body: ChatCompletionRequest
    job: Job
    prompt: str

    def choice(self) -> Choice:
        """A choice that nothing has come of yet."""
        return Choice(self)

    @property
    def reasons(self) -> bool:
        """Whether reasoning is told apart.

        A grammar that leaves no room for it begins with the text, also where the template has opened reasoning.
        """
        begins, params = prompt_reasoning(self.prompt), self.job.params[0]
        has_room = params.structured_outputs is None or params.reasoning_token_ids is not None
        may_reason = begins is None or (begins and has_room)
        return bool(self.state.args.reasoning_parser) and self.body.separate_reasoning and may_reason

    def parser(self) -> OutputParser:
        """A parser for one choice."""
        return OutputParser(
            self.state.args.reasoning_parser if self.reasons else None,
            self.state.args.tool_call_parser if self.body.tools else None,
            starts_in_reasoning=bool(prompt_reasoning(self.prompt)),
            **self.body.parser_options(),
        )

    def head(self, kind: str) -> dict[str, Any]:
        """What an answer and every chunk begin with."""
        return {"id": self.job.id, "object": kind, "created": self.job.created, "model": self.state.model}


class Choice:
    """One completion of a chat, as it comes."""

    def __init__(self, chat: Chat):
        body = chat.body
        self._body, self._job = body, chat.job
        self.parser = chat.parser()
        self.has_role = False
        self.buffer = ChunkBuffer(chat.state.args.stream_interval)
        tokenizer, prompt = chat.state.renderer.need_tokenizer("a chat"), chat.job.prompts[0]
        self._texts = TokenTexts(tokenizer, as_ids=body.return_tokens_as_token_ids)
        self._sources = TokenSources(tokenizer, prompt) if body.return_token_sources else None
        self._reasoning = ReasoningCount(tokenizer, prompt) if chat.reasons else None
        self._call: int | None = None  # the index of the one call that is kept, if there may be but one

    def parse(self, completion: CompletionDelta) -> list[Delta]:
        """What the completion's text means, as far as it can be told."""
        deltas = self.parser.push(completion.text)
        if completion.finish_reason is not None:
            deltas += self.parser.finish()
        if self._reasoning is not None:
            self._reasoning.take(completion, deltas)
            if completion.finish_reason is not None:
                self._job.num_reasoning_tokens += self._reasoning.number
        if not self._body.parallel_tool_calls:
            deltas = [delta for delta in deltas if self._is_kept(delta)]
        return deltas if self._body.include_reasoning else [d for d in deltas if d.reasoning is None]

    def _is_kept(self, delta: Delta) -> bool:
        """Whether a piece is none of a second call; a call that is retracted was none."""
        call = delta.tool_call
        if call is None:
            return True
        if self._call is None:
            self._call = call.index
        is_kept = call.index == self._call
        if is_kept and call.retracted:
            self._call = None
        return is_kept

    def finish_reason(self, completion: CompletionDelta) -> str | None:
        """As OpenAI has it: a choice that calls tools, and was not made to call that one, says so."""
        if completion.finish_reason == "stop" and self.parser.has_tool_calls and self._body.tool_name is None:
            return "tool_calls"
        return completion.finish_reason

    def extras(self, completion: CompletionDelta) -> dict[str, Any]:
        """What a choice has besides its message."""
        extras: dict[str, Any] = {}
        if completion.logprobs is not None:
            extras["logprobs"] = chat_logprobs(completion.logprobs, self._body.top_logprobs, self._texts)
        if self._body.return_token_ids:
            extras["token_ids"] = completion.token_ids
        if self._sources is not None:
            extras["tokens"] = self._sources.of(completion)
        return extras

    def chunks(self, completion: CompletionDelta) -> list[dict[str, Any]]:
        """The choices of the chunks that a delta makes."""
        messages = [_message_delta(delta) for delta in self.parse(completion)]
        extras, finish = self.extras(completion), self.finish_reason(completion)
        if not self.has_role:
            self.has_role = True
            messages.insert(0, {"role": "assistant", "content": ""})
        elif not messages and (finish or "tokens" in extras or "logprobs" in extras or "token_ids" in extras):
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


class ReasoningCount:
    """Counts the tokens of a completion up to the end of its reasoning, once there is any.

    The end is found in the text: not in every vocabulary is it a token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=False)
        self._tail = ""
        self._num_tokens = 0
        self._has_ended = self._has_reasoning = False

    @property
    def number(self) -> int:
        """Of the tokens, those of the tags included."""
        return self._num_tokens if self._has_reasoning else 0

    def take(self, completion: CompletionDelta, deltas: Sequence[Delta]) -> None:
        """Count more of the completion; `deltas` are what it means."""
        self._has_reasoning |= any(delta.reasoning for delta in deltas)
        for token_id in completion.token_ids if not self._has_ended else ():
            self._num_tokens += 1
            text = self._tail + self._detokenizer.push(token_id)
            if END_THINK in text:
                self._has_ended = True
                return
            self._tail = text[1 - len(END_THINK) :]


def chat_router(state: ServerState) -> APIRouter:
    """The endpoint of chats."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None, summary="Answer a chat")
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        chat = await _chat(state, body, request)
        headers = response_headers(state, chat.job)
        if body.stream:
            return await EventStream.of(_stream(chat), headers)
        return await unless_left(request, _answer(chat, headers))

    return router


async def _chat(state: ServerState, body: ChatCompletionRequest, request: Request) -> Chat:
    state.check_model(body.model)
    _check_tools(state, body)
    params = sampling_params(body, state.defaults, state.args.limits)
    if params.max_tokens is None and "max_new_tokens" in state.defaults:
        params = replace(params, max_tokens=state.defaults["max_new_tokens"])
    text, token_ids = await state.render(lambda: _rendered(state, body))
    if params.structured_outputs is not None and state.args.reasoning_parser and body.separate_reasoning:
        tokenizer = state.renderer.need_tokenizer("a chat")
        params = replace(params, reasoning_token_ids=reasoning_token_ids(tokenizer, text))
    job = new_job(state, body, request, "chatcmpl", [token_ids], params)
    log_request(state, job, text)
    return Chat(state, body, job, text)


def reasoning_token_ids(tokenizer: Tokenizer, prompt: str) -> tuple[int | None, int] | None:
    """Of `SamplingParams`: the tags around reasoning that may come before a structured output.

    None where the template has closed it, or where the tags are no tokens, so that no mask can tell them.
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
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set: start the server '
            "with them, or set tool_choice to 'none', 'required' or a tool.",
            param="tool_choice",
        )


async def _answer(chat: Chat, headers: dict[str, str]) -> Response:
    choices: list[dict[str, Any]] = []
    of_prompt = None
    async with aclosing(follow(chat.state, chat.job)) as news:
        async for _, delta in without_keepalives(news):
            of_prompt = prompt_logprobs(delta.prompt_logprobs)
            choices += [_whole_choice(chat.choice(), completion) for completion in delta.completions]
    answer = chat.head("chat.completion") | {"choices": sorted(choices, key=lambda choice: choice["index"])}
    answer |= costs(chat.state, chat.job, with_reasoning=chat.reasons)
    if of_prompt is not None:
        answer["prompt_logprobs"] = of_prompt
    if chat.body.return_token_ids:
        answer["prompt_token_ids"] = chat.job.prompts[0]
    return json_response(answer, headers=headers)


def _whole_choice(choice: Choice, completion: CompletionDelta) -> dict[str, Any]:
    parsed = collect(choice.parse(completion))
    return {
        "index": completion.index,
        "message": _message(parsed),
        "logprobs": None,
        "finish_reason": choice.finish_reason(completion),
        "stop_reason": completion.stop_reason,
    } | choice.extras(completion)


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


def _chunks(choices: Sequence[Choice], delta: RequestDelta) -> Iterator[dict[str, Any]]:
    """The choices of the chunks that a delta makes."""
    for completion in delta.completions:
        choice = choices[completion.index]
        if (held := choice.buffer.push(completion)) is not None:
            yield from choice.chunks(held)


async def _stream(chat: Chat) -> Events:
    state, body, job = chat.state, chat.body, chat.job
    head = chat.head("chat.completion.chunk")
    choices = [chat.choice() for _ in range(body.n)]
    is_first = True
    async with aclosing(follow(state, job, state.args.sse_keep_alive_interval or None)) as deltas:
        async for news in deltas:
            if news is None:
                yield KEEP_ALIVE
                continue
            for chunk in _chunks(choices, news[1]):
                message = head | {"choices": [chunk]}
                if is_first and body.return_token_ids:
                    message["prompt_token_ids"] = job.prompts[0]
                if body.continuous_usage_stats:
                    message["usage"] = usage_of(job, with_cached=False)
                is_first = False
                yield event(message)
    if body.include_usage or state.args.enable_force_include_usage:
        yield event(head | {"choices": []} | costs(state, job, with_reasoning=chat.reasons))
    yield DONE
