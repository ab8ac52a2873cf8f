"""A scripted server for the page: its files under the real headers, and an API that recites."""

import asyncio
import contextlib
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from itertools import cycle

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dflash_jax.serve.http.page import FILES, FOLDER, HEADERS

TIDES = """The tide is the slow breathing of the sea against the land. Twice a day the water climbs the harbour wall \
and twice it falls away, because the Moon pulls a little harder on the near side of the Earth than on the far side.

The Sun takes part as well. When the three stand in line, at new and full moon, their pulls add up and the range is \
largest: spring tides. A week later they stand at right angles and partly cancel: neap tides.

def height(t, mean, moon, sun):
    return mean + moon * cos(2 * pi * t / 12.42) + sun * cos(2 * pi * t / 12.00)

So two clocks, one of 12.42 hours and one of 12.00, are enough to say when a boat will float. 🌊"""
MARKUP = "<img src=x onerror=alert(1)> <script>alert(2)</script> <b>not bold</b> &amp; done"
ACCEPTED = (5, 2, 7, 7, 0, 4, 7, 1, 6, 7, 3)  # drafts of each round, again and again
K = 7


def pieces(text):
    """Line breaks, and words with the spaces before them; a wave is three tokens, as bytes would be."""
    words = re.findall(r"\n+| *\S+| +$", text)
    return [piece for word in words for piece in (["", "", word] if "🌊" in word else [word])]


def chunks(text, speculation):
    """The tokens of each chunk: the first comes from prefill, then k drafted ones and one of the target's own."""
    todo = pieces(text)
    yield [{"text": todo.pop(0), "drafted": False}]
    for k in cycle(ACCEPTED if speculation else (0,)):
        if not todo:
            return
        took, todo = todo[: k + 1], todo[k + 1 :]
        yield [{"text": piece, "drafted": i < k} for i, piece in enumerate(took)]


def metrics(sent, speculation):
    """What the server's last chunk says of the chunks after the first; a cut last round is one of fewer drafts."""
    out = {"time_to_first_token_ms": 34.2, "tokens_per_second": 200.0}
    if speculation:
        rounds = [sum(token["drafted"] for token in tokens) for tokens in sent[1:]]
        out["speculative_decoding"] = {
            "mean_acceptance_length": 1 + sum(rounds) / max(len(rounds), 1),
            "acceptance_histogram": [rounds.count(k) for k in range(K + 1)],
            "num_spec_steps": len(rounds),
            "num_accepted_draft_tokens": sum(rounds),
            "num_draft_tokens": K * len(rounds),
        }
    return out


@dataclass
class Mock:
    """What the server is to answer, and the requests that it has seen."""

    chat_template: bool = True
    says_chat_template: bool = True  # in /v1/models
    api_key: str | None = None
    loading: int = 0  # how many more questions after its health are answered 503
    queue_full: bool = False
    delay: float = 0.002  # seconds between chunks
    bodies: list[dict] = field(default_factory=list)
    refused: int = 0
    aborted: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def refuse(self, status, message):
        self.refused += 1
        return JSONResponse({"error": {"message": message, "type": "Error", "param": None, "code": status}}, status)

    async def health(self, request):
        self.loading = max(self.loading - 1, 0)
        self.refused += self.loading > 0
        return Response(status_code=503 if self.loading else 200)

    async def models(self, request):
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return self.refuse(401, "The key is missing or unknown.")
        extra = {"chat_template": self.chat_template} if self.says_chat_template else {}
        return JSONResponse({"object": "list", "data": [{"id": "embedded-pair", "object": "model", **extra}]})

    async def generate(self, request):
        body = await request.json()
        chat = "messages" in body
        self.bodies.append(body)
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return self.refuse(401, "The key is missing or unknown.")
        if self.loading or self.queue_full:
            return self.refuse(503, "The queue is full." if self.queue_full else "The engine is starting.")
        if chat and not self.chat_template:
            return self.refuse(400, "embedded-pair has no chat template: send text to /v1/completions.")
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        if prompt == "too hot":
            return self.refuse(400, "temperature is 9: give 0 to 2.")
        return StreamingResponse(self.stream(prompt, chat, body["speculation"]), media_type="text/event-stream")

    async def stream(self, prompt, chat, speculation):
        scripts = {"endless": " again" * 100_000, "markup": MARKUP, "think": "<think> Hm, so. </think> Yes."}
        scripts["long"] = "\n".join(f"line {i}" for i in range(700)) + "\n"
        kind = {"object": "chat.completion.chunk" if chat else "text_completion", "id": "1", "created": 0}
        sent, thinking = [], False
        try:
            if chat:
                yield event(kind | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            for tokens in chunks(scripts.get(prompt, TIDES), speculation):
                await asyncio.sleep(self.delay)
                sent.append(tokens)
                text = "".join(token["text"] for token in tokens)
                choice = {"index": 0, "finish_reason": None, "tokens": tokens}
                if prompt == "think":
                    for choice in think(tokens, thinking):
                        yield event(kind | {"choices": [choice]})
                    thinking = "</think>" not in text and (thinking or "<think>" in text)
                    continue
                said = {"delta": {"content": text}} if chat else {"text": text}
                yield event(kind | {"choices": [choice | said]})
                yield ": keep-alive\n\n"
                if prompt == "broken" and len(sent) == 3:
                    yield event({"error": {"message": "The engine stopped.", "code": 500}}) + "data: [DONE]\n\n"
                    return
            end = {"index": 0, "finish_reason": "length", "tokens": []}
            yield event(kind | {"choices": [end | ({"delta": {}} if chat else {"text": ""})]})
            usage = {"prompt_tokens": 3, "completion_tokens": sum(map(len, sent))}
            yield event(kind | {"choices": [], "usage": usage, "metrics": metrics(sent, speculation)})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.aborted.set()
            raise


def think(tokens, thinking):
    """The choices of a chunk of a thinking model: first its tokens without text, then each text without tokens."""
    yield {"index": 0, "delta": {}, "finish_reason": None, "tokens": tokens}
    for token in tokens:
        if "think>" in token["text"]:
            thinking = "</" not in token["text"]
        elif thinking:
            yield {"index": 0, "delta": {"reasoning": token["text"], "reasoning_content": token["text"]}}
        else:
            yield {"index": 0, "delta": {"content": token["text"]}}


def event(payload):
    return f"data: {json.dumps(payload)}\n\n"


async def file(request):
    name, media_type = FILES[request.url.path]
    return Response((FOLDER / name).read_bytes(), media_type=media_type, headers=HEADERS)


@contextlib.contextmanager
def serving(mock):
    """The mock on a free port of this machine, in a thread; `mock.url` says where."""
    app = Starlette(
        routes=[
            Route("/health", mock.health),
            Route("/v1/models", mock.models),
            Route("/v1/chat/completions", mock.generate, methods=["POST"]),
            Route("/v1/completions", mock.generate, methods=["POST"]),
            *(Route(path, file) for path in FILES),
        ]
    )
    listener = socket.create_server(("127.0.0.1", 0))
    mock.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield mock
    finally:
        server.should_exit = True
        thread.join(timeout=10)
