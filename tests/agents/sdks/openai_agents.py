"""OpenAI's Agents SDK, over either of its APIs: an agent that calls a tool. Prints what came of it as JSON."""

import asyncio
import json
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

CALLS = []


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    CALLS.append(city)
    return f"It rains in {city}."


async def main(api: str, base_url: str, streamed: bool) -> None:
    client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    model = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[api]("m", client)
    settings = ModelSettings(include_usage=True)  # streams of chats tell none unless asked
    agent = Agent(
        "meteorologist", instructions="Ask for the weather.", tools=[weather], model=model, model_settings=settings
    )
    if streamed:
        result = Runner.run_streamed(agent, "How is the weather in Oslo?")
        events = [event.type async for event in result.stream_events()]
    else:
        result, events = await Runner.run(agent, "How is the weather in Oslo?"), []
    usage = result.context_wrapper.usage
    cached = usage.input_tokens_details.cached_tokens
    print(
        json.dumps(
            {
                "text": result.final_output,
                "calls": CALLS,
                "requests": usage.requests,
                "cached": cached,
                "events": len(events),
            }
        )
    )


if __name__ == "__main__":
    set_tracing_disabled(True)
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3] == "streamed"))
