"""`AsyncLLM`: one engine for many callers at once, each awaiting outputs of its own.

The engine's thread hands over snapshots that share what they hold; outputs are made of them in the caller's event loop.
(The server has its engine in another process, and sends pieces: `serve/engine_link`.)
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash_jax.base.errors import EngineDeadError
from dflash_jax.base.outputs import RequestOutput
from dflash_jax.base.values import Prompt, SamplingParams
from dflash_jax.engine.host.request import Request, Snapshot
from dflash_jax.engine.thread import EngineThread
from dflash_jax.frontend import load
from dflash_jax.options import EngineArgs

MOST_QUEUED = 4096  # sequences that may wait, unless `max_num_queued_seqs` says otherwise
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Stream:
    """Outputs on their way from the engine's thread to a caller's event loop.

    An output holds all that has come so far, so only the newest is kept: a slow reader skips some, and loses nothing.
    """

    request_id: str
    loop: asyncio.AbstractEventLoop
    news: asyncio.Event = field(default_factory=asyncio.Event)
    newest: Snapshot | Exception | None = None

    def put(self, news: Request | Exception) -> None:
        """Take what there is of a request, or why there is no more of it; call it in the engine's thread."""
        newest = news.snapshot() if isinstance(news, Request) else news

        def deliver() -> None:
            self.newest = newest
            self.news.set()

        try:
            self.loop.call_soon_threadsafe(deliver)
        except RuntimeError:  # the caller's loop is closed: nobody listens
            logger.debug("request %s: its event loop is closed", self.request_id)

    async def get(self) -> RequestOutput:
        """Wait for an output that has not been read, the newest."""
        await self.news.wait()
        self.news.clear()
        assert self.newest is not None
        if isinstance(self.newest, Exception):
            raise self.newest
        return self.newest.output()


class AsyncLLM:
    """A loaded model that serves requests as they come. The engine runs in a thread of its own.

    Args:
        model: a folder, or a Hugging Face Hub id, of a Qwen3 or Llama model; None serves the embedded pair.
        draft_model: folder or Hub id of its DFlash drafter; None decodes one token a pass.
        options: see `EngineArgs`; by default accelerators compile every step at start, and the queue is bounded.

    Raises:
        ConfigError: an unknown architecture, a drafter that does not fit, or an unknown or impossible option.
        CheckpointError: a folder, file or tensor is missing, damaged or surplus.
    """

    def __init__(self, model: str | Path | None = None, draft_model: str | Path | None = None, **options: Any):
        args = EngineArgs.of({"compile_at_start": None, "max_num_queued_seqs": MOST_QUEUED} | options)
        self.frontend, self.engine = load(model, draft_model, args)
        self.config, self.tokenizer = self.engine.config, self.frontend.tokenizer
        self._thread = EngineThread(self.engine)
        self._intake = ThreadPoolExecutor(1)  # one thread: tokenizers are not thread-safe

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt; yield the output so far whenever it has grown, and at last the finished output.

        Leaving early, or being cancelled, aborts the request.

        Args:
            prompt: a string, `{"prompt": ...}` or `{"prompt_token_ids": [...]}`.
            sampling_params: None takes `get_default_sampling_params()`.
            request_id: for `abort`; None takes one at random. No two running requests may have the same id.

        Raises:
            RequestError: the prompt or its parameters cannot be served, or the id is taken.
            QueueFullError: too many sequences wait already.
            EngineDeadError: the engine has failed for good, or is closed.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        loop = asyncio.get_running_loop()
        # In another thread: tokenising a long prompt or compiling a grammar must not delay other streams.
        make = partial(self.frontend.request, prompt, params, request_id or uuid.uuid4().hex)
        try:
            request = await loop.run_in_executor(self._intake, make)
        except RuntimeError as error:  # of an executor that has been shut down
            raise EngineDeadError(self._thread.cause) if self._thread.is_dead else error from error
        stream = Stream(request.request_id, loop)
        self._thread.add(request, stream.put)
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    break
        finally:
            if not request.finished:
                with suppress(EngineDeadError):
                    self._thread.abort_request(request)

    async def abort(self, request_id: str) -> None:
        """End a request now: its stream ends with the output so far, finish_reason "abort". Unknown ids are ignored."""
        self._thread.abort(request_id)

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generation_config.json` recommends, as vLLM reads it."""
        return self.frontend.get_default_sampling_params()

    @property
    def is_dead(self) -> bool:
        """Whether no request can be served any more."""
        return self._thread.is_dead

    def close(self) -> None:
        """Abort what runs and end the engine's thread."""
        self._thread.close()
        self._intake.shutdown()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)
