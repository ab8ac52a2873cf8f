"""Which replica serves a request: the one whose prefix cache has its conversation. Ray's HTTP proxies run this.

A request goes by its session, the header `x-session-id`. Clients that send none get one made of how their prompt
begins, so that every turn of a chat names the session of the first. Neither the server nor JAX is imported here.
"""

from __future__ import annotations

import hashlib

import msgspec
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SESSION = b"x-session-id"  # what Ray reads; RAY_SERVE_SESSION_ID_HEADER_KEY would change it there
MOST_BYTES = 4 * 1024**2  # of a body that is held back to be read; a larger one goes where there is room
FIRST_BYTES = 1024  # of a prompt that is no chat
ROLES_BEFORE = ("system", "developer")  # of messages that many conversations share


class Turn(msgspec.Struct):
    """A message of a chat, or an item of a response."""

    role: str = ""


class Prompt(msgspec.Struct):
    """The beginning of a prompt in any of the server's APIs; all else in a body is skipped."""

    prompt_cache_key: str | None = None
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: list[msgspec.Raw] | None = None
    input: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    text: msgspec.Raw = msgspec.Raw(b"")
    input_ids: msgspec.Raw = msgspec.Raw(b"")


PROMPT = msgspec.json.Decoder(Prompt)
TURN = msgspec.json.Decoder(Turn)
TURNS = msgspec.json.Decoder(list[msgspec.Raw])


def prompt_key(body: bytes) -> str | None:
    """Return the session of a body that names none; None if it has no prompt that can be read.

    It is OpenAI's `prompt_cache_key`, or a hash of all up to the first message that is the user's own. The system's
    prompt alone would send every conversation of an application to one replica; more would part the turns of a chat.
    """
    try:
        prompt = PROMPT.decode(body)
        if prompt.prompt_cache_key:
            return prompt.prompt_cache_key
        items = prompt.messages
        if items is None and bytes(prompt.input).startswith(b"["):
            items = TURNS.decode(prompt.input)
        start = [bytes(prompt.system), bytes(prompt.instructions)]
        if items is None:
            start += [bytes(raw)[:FIRST_BYTES] for raw in (prompt.input, prompt.prompt, prompt.text, prompt.input_ids)]
        else:
            start += first_turns(items)
    except msgspec.DecodeError:
        return None
    joined = b"\0".join(start)
    return hashlib.blake2b(joined, digest_size=16).hexdigest() if joined.strip(b"\0") else None


def first_turns(items: list[msgspec.Raw]) -> list[bytes]:
    """Return the messages up to the first that is neither the system's nor the developer's, that one included."""
    start = []
    for raw in items:
        start.append(bytes(raw))
        if TURN.decode(raw).role not in ROLES_BEFORE:
            break
    return start


class PromptSession:
    """Gives a POST without a session the one that its prompt makes.

    Args:
        app: Ray's proxy.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hold back the body of a request until it can be read, then send it on as it came."""
        if scope["type"] != "http" or scope["method"] != "POST" or any(name == SESSION for name, _ in scope["headers"]):
            return await self._app(scope, receive, send)
        held, size, is_more = [], 0, True
        while is_more and size <= MOST_BYTES:
            message = await receive()
            held.append(message)
            size += len(message.get("body", b""))
            is_more = message.get("more_body", False)
        body = b"" if size > MOST_BYTES else b"".join(message.get("body", b"") for message in held)
        if (key := prompt_key(body)) is not None:
            scope = {**scope, "headers": [*scope["headers"], (SESSION, key.encode())]}
        held.reverse()

        async def replay() -> Message:
            return held.pop() if held else await receive()

        await self._app(scope, replay, send)


def middlewares() -> list[Middleware]:
    """Return what RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH puts before Ray's proxies."""
    return [Middleware(PromptSession)]


class SessionRouter(RequestRouter):
    """Sends a session to the same replica for as long as that is there and not far behind.

    Rendezvous hashing ranks the replicas for a session: when one goes or comes, only its own sessions move, and proxies
    agree without talking to each other. Requests without a session go to the shortest queue.
    """

    _most_ahead = 16

    def initialize_state(self, most_ahead: int = 16) -> None:
        """Take the `request_router_kwargs`.

        Args:
            most_ahead: requests that a session's replica may have more than the idlest one before another serves it.

        Raises:
            ValueError: it is negative.
        """
        if most_ahead < 0:
            raise ValueError(f"most_ahead={most_ahead} must not be negative; 0 sends sessions to the shortest queue.")
        self._most_ahead = most_ahead

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which Ray is to try them; of those in one list, the shortest queue."""
        if pending_request is None:
            return [candidate_replicas]
        # Without it, Ray asks again at once while every replica is full, and the proxy's loop does nothing else.
        pending_request.routing_context.should_backoff = True
        session = pending_request.metadata.session_id
        if not session or len(candidate_replicas) < 2:
            return [candidate_replicas]
        queues = {replica.replica_id: self._queue(replica.replica_id) for replica in candidate_replicas}
        bound = min(queues.values()) + self._most_ahead
        near = [replica for replica in candidate_replicas if queues[replica.replica_id] <= bound]
        first = max(near, key=lambda replica: rank(session, replica.replica_id.unique_id))
        return [[first], candidate_replicas]

    def _queue(self, replica_id: ReplicaID) -> int:
        """Return the last known number of requests of a replica; 0 if none is known."""
        return self.replica_queue_len_cache.get(replica_id) or 0


def rank(session: str, replica: str) -> bytes:
    """Return the rank of a replica for a session; the highest is its home."""
    return hashlib.blake2b(f"{session}\0{replica}".encode(), digest_size=8).digest()
