"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from dflash_jax.serve.answers import ChunkBuffer, TokenSources, costs, headers_of, log_request, new_job
from dflash_jax.serve.jobs import Job, follow
from dflash_jax.serve.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from dflash_jax.serve.messages import CompletionDelta
from dflash_jax.serve.parsing import Delta, OutputParser, ParsedOutput, collect, prompt_reasoning
from dflash_jax.serve.protocol import APIError, ChatCompletionRequest, sampling_params
from dflash_jax.serve.state import ServerState
from dflash_jax.serve.streaming import DONE, KEEP_ALIVE, Events, EventStream, event, json_response, started, unless_left
from dflash_jax.serve.usage import usage_of

END_OF_REASONING = "</think>"


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

        A grammar begins with the text, so where it rules, what the template has opened holds no reasoning.
        """
        begins, is_constrained = prompt_reasoning(self.prompt), self.job.params[0].structured_outputs is not None
        may_reason = begins is None or (begins and not is_constrained)
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
        self._texts = TokenTexts(as_ids=body.return_tokens_as_token_ids)
        tokenizer = chat.state.renderer.tokenizer
        assert tokenizer is not None
        self._sources = TokenSources(tokenizer, chat.job.prompts[0]) if body.return_token_sources else None
        self._reasons = chat.reasons
        self._end = tokenizer.hf.convert_tokens_to_ids(END_OF_REASONING) if chat.reasons else None
        self._num_before_end = 0
        self._has_reasoning = False

    def parse(self, completion: CompletionDelta) -> list[Delta]:
        """What the completion's text means, as far as it can be told."""
        deltas = self.parser.push(completion.text)
        if completion.finish_reason is not None:
            deltas += self.parser.finish()
        if self._reasons:
            self._count_reasoning(completion, deltas)
        return deltas if self._body.include_reasoning else [d for d in deltas if d.reasoning is None]

    def _count_reasoning(self, completion: CompletionDelta, deltas: Sequence[Delta]) -> None:
        """Count the tokens up to the end of the reasoning, once it is known that there is any."""
        if self._end is not None:
            if self._end in completion.token_ids:
                self._num_before_end += completion.token_ids.index(self._end) + 1
                self._end = None
            else:
                self._num_before_end += len(completion.token_ids)
        self._has_reasoning |= any(delta.reasoning for delta in deltas)
        if completion.finish_reason is not None and self._has_reasoning:
            self._job.num_reasoning_tokens += self._num_before_end

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


def chat_router(state: ServerState) -> APIRouter:
    """The endpoint of chats."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None, summary="Answer a chat")
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        chat = await _chat(state, body, request)
        headers = headers_of(state, chat.job)
        if body.stream:
            return EventStream(await started(_stream(chat)), headers)
        return await unless_left(request, _answer(chat, headers))

    return router


async def _chat(state: ServerState, body: ChatCompletionRequest, request: Request) -> Chat:
    state.check_model(body.model)
    _check_tools(state, body)
    params = sampling_params(body, state.defaults, state.args.limits)
    if params.max_tokens is None and "max_new_tokens" in state.defaults:
        params = replace(params, max_tokens=state.defaults["max_new_tokens"])
    text, token_ids = await state.render(lambda: render(state, body))
    job = new_job(state, body, request, "chatcmpl", [token_ids], params)
    log_request(state, job, text)
    return Chat(state, body, job, text)


def render(state: ServerState, body: Any) -> tuple[str, list[int]]:
    """A conversation as text and tokens.

    Raises:
        RequestError: the model has no chat template, or it refuses the messages.
    """
    text = state.renderer.chat_text(
        body.messages,
        chat_template=state.args.chat_template,
        add_generation_prompt=body.add_generation_prompt,
        chat_template_kwargs=body.template_kwargs(state.args.default_chat_template_kwargs),
    )
    return text, state.renderer.need_tokenizer("a chat").encode(text, add_special_tokens=False)


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
    async for news in follow(chat.state, chat.job):
        assert news is not None  # nobody asked to hear of nothing
        of_prompt = prompt_logprobs(news[1].prompt_logprobs)
        choices += [_whole_choice(chat.choice(), completion) for completion in news[1].completions]
    answer = chat.head("chat.completion") | {"choices": sorted(choices, key=lambda choice: choice["index"])}
    answer |= costs(chat.state, chat.job, reasons=chat.reasons)
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


async def _stream(chat: Chat) -> Events:
    state, body, job = chat.state, chat.body, chat.job
    head = chat.head("chat.completion.chunk")
    choices = [chat.choice() for _ in range(body.n)]
    is_first = True
    async for news in follow(state, job, state.args.sse_keep_alive_interval or None):
        if news is None:
            yield KEEP_ALIVE
            continue
        for completion in news[1].completions:
            choice = choices[completion.index]
            held = choice.buffer.push(completion)
            for chunk in choice.chunks(held) if held else ():
                message = head | {"choices": [chunk]}
                if is_first and body.return_token_ids:
                    message["prompt_token_ids"] = job.prompts[0]
                if body.continuous_usage_stats:
                    message["usage"] = usage_of(job, with_cached=False)
                is_first = False
                yield event(message)
    if body.include_usage or state.args.enable_force_include_usage:
        yield event(head | {"choices": []} | costs(state, job, reasons=chat.reasons))
    yield DONE
