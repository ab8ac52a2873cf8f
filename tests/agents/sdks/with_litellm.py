"""LiteLLM: a chat with a tool, its result and a stream; a response; and its bridge from Anthropic's API."""

import asyncio
import json
import sys

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION = [{"role": "user", "content": "How is the weather in Oslo?"}]


def completion(base_url: str, streamed: bool) -> dict:
    options = {"model": "openai/m", "api_base": base_url, "api_key": "none", "tools": [TOOL]}

    def ask(messages):
        answer = litellm.completion(messages=messages, stream=streamed, **options)
        return litellm.stream_chunk_builder(list(answer), messages=messages) if streamed else answer

    first = ask(QUESTION)
    (call,) = first.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    assistant = first.choices[0].message.model_dump(exclude_none=True)
    last = ask([*QUESTION, assistant, result])
    arguments = json.loads(call.function.arguments)
    return {"text": last.choices[0].message.content, "calls": [arguments["city"]]}


def responses(base_url: str) -> dict:
    answer = litellm.responses(
        model="openai/m",
        input="How is the weather in Oslo?",
        api_base=base_url,
        api_key="none",
        tools=[{"type": "function", **TOOL["function"]}],
    )
    (call,) = [item for item in answer.output if item.type == "function_call"]
    return {"text": "", "calls": [json.loads(call.arguments)["city"]]}


def anthropic(base_url: str) -> dict:
    answer = asyncio.run(
        litellm.anthropic.messages.acreate(
            model="openai/m",
            messages=QUESTION,
            max_tokens=200,
            api_base=base_url,
            api_key="none",
            tools=[{"name": "weather", "input_schema": TOOL["function"]["parameters"]}],
        )
    )
    answer = answer if isinstance(answer, dict) else answer.model_dump()
    (block,) = [block for block in answer["content"] if block["type"] == "tool_use"]
    return {"text": "", "calls": [block["input"]["city"]]}


if __name__ == "__main__":
    kind, url, how = sys.argv[1:]
    kinds = {"completion": lambda: completion(url, how == "streamed"), "responses": lambda: responses(url)}
    print(json.dumps(kinds[kind]() if kind in kinds else anthropic(url)))
