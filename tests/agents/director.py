"""A proxy before a real server that puts words into the model's mouth: `structured_outputs` allows one text alone.

The model of the tests knows no tools, so a script says what it answers. Everything else is real: the agent's requests,
the prompt that the template makes of them, the prefix cache, drafted rounds, the parser of calls, and the stream.
"""

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tests.serve.live import free_port

CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
ASIDE = "A short title"  # what the model says to other requests, such as those for a title
HOP_BY_HOP = {"content-length", "transfer-encoding", "connection", "content-encoding", "host", "accept-encoding"}


@dataclass
class Turn:
    """One request of an agent's conversation.

    Attributes:
        id: that the server logs.
        body: as the agent sent it.
        number: results of tools that it holds.
        status: of the answer.
    """

    id: str
    body: dict
    number: int
    status: int = 0


@dataclass
class Director:
    """The proxy's state.

    Attributes:
        server: URL of the server.
        name: that the ids of its turns begin with.
        says: what the model says, by the number of results of tools that have come back.
        tools: names of the tools of the conversation, which the first request with tools begins.
        turns: its requests, in the order they came.
        paths: method and path of all requests, with the status of the answer.
    """

    server: str
    name: str
    says: list[str]
    tools: list[str] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    paths: list[tuple[str, str, int]] = field(default_factory=list)

    def directed(self, path: str, body: dict) -> Turn | None:
        """Add the words to a body, in place; the turn, if the request is one."""
        body["temperature"] = 0
        tools = [tool.get("name") or tool.get("function", tool).get("name") for tool in body.get("tools") or ()]
        self.tools = self.tools or tools
        if not tools or tools != self.tools:
            body["structured_outputs"] = {"choice": [ASIDE]}
            return None
        number = num_results(path, body)
        turn = Turn(f"{self.name}-{len(self.turns)}", json.loads(json.dumps(body)), number)
        body["structured_outputs"] = {"choice": [self.says[min(number, len(self.says) - 1)]]}
        self.turns.append(turn)
        return turn

    async def pass_on(self, request: Request) -> Response:
        """Answer a request as the server does."""
        raw, turn = await request.body(), None
        headers = {name: value for name, value in request.headers.items() if name not in HOP_BY_HOP}
        if request.method == "POST" and request.url.path in CHATS:
            body = json.loads(raw)
            turn = self.directed(request.url.path, body)
            raw = json.dumps(body).encode()
            headers["x-request-id"] = f"{self.name}-aside" if turn is None else turn.id
        client = httpx.AsyncClient(timeout=600)
        url = httpx.URL(self.server + request.url.path, query=request.url.query.encode())
        answer = await client.send(client.build_request(request.method, url, headers=headers, content=raw), stream=True)
        self.paths.append((request.method, request.url.path, answer.status_code))
        if turn is not None:
            turn.status = answer.status_code
        kept = {name: value for name, value in answer.headers.items() if name not in HOP_BY_HOP}

        async def close() -> None:
            await answer.aclose()
            await client.aclose()

        return StreamingResponse(answer.aiter_raw(), answer.status_code, kept, background=BackgroundTask(close))


def num_results(path: str, body: dict) -> int:
    """Results of tools in a conversation, whichever API it is in."""
    if path == "/v1/responses":
        items = body["input"] if isinstance(body["input"], list) else []
        return sum(str(item.get("type", "")).endswith("_call_output") for item in items)
    if path == "/v1/messages":
        blocks = [block for message in body["messages"] for block in message["content"] if isinstance(block, dict)]
        return sum(block.get("type") == "tool_result" for block in blocks)
    return sum(message["role"] == "tool" for message in body["messages"])


@contextmanager
def directing(server: str, name: str, says: list[str]):
    """Run a director in a thread; yields it and its URL."""
    director, port = Director(server, name, says), free_port()
    app = Starlette()
    app.add_route("/{path:path}", director.pass_on, methods=["GET", "POST", "HEAD", "OPTIONS"])
    proxy = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=proxy.run, daemon=True)
    thread.start()
    while not proxy.started:
        time.sleep(0.01)
    try:
        yield director, f"http://127.0.0.1:{port}"
    finally:
        proxy.should_exit = True
        thread.join(30)
