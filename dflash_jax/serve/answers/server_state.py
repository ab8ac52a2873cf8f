"""The parts of the server that every route works with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dflash_jax.base.errors import ConfigError
from dflash_jax.options.serve_args import ServeArgs
from dflash_jax.serve.answers.metrics import Metrics
from dflash_jax.serve.engine_link.client import EngineClient
from dflash_jax.serve.engine_link.link_messages import Ready
from dflash_jax.serve.protocol import APIError
from dflash_jax.text.renderer import Renderer

RENDER_THREADS = 4  # threads that render templates and tokenise: one long text must not hold up everyone's prompts
Result = TypeVar("Result")


@dataclass(eq=False)
class ServerState:
    """The server's parts.

    Attributes:
        args: options of the command line.
        renderer: renders and tokenises; long work goes through `render`.
        client: the server's side of the engine process.
        metrics: of all requests.
        defaults: sampling defaults, for what a request leaves open.
        most_tokens: most tokens of an answer, whatever a request asks for; None sets no limit.
        running: engine ids of the running requests, by each id that /abort_request may name.
        created: Unix time of the start, seconds.
    """

    args: ServeArgs
    renderer: Renderer
    client: EngineClient
    metrics: Metrics
    defaults: dict[str, Any]
    most_tokens: int | None = None
    running: dict[str, list[str]] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(RENDER_THREADS, "dflash-render"))

    @property
    def ready(self) -> Ready:
        """The engine's limits.

        Raises:
            APIError: 503; no engine serves.
        """
        if self.client.ready is None:
            raise APIError(self.client.cause, 503)
        return self.client.ready

    @property
    def model(self) -> str:
        """The model's name in answers."""
        return self.args.served_model_name[0]

    def check_model(self, name: str | None) -> None:
        """Check the model that a request names; None and "" stand for the served one.

        Raises:
            APIError: 404; it is not a name of the served model.
        """
        if name and name not in self.args.served_model_name:
            served = ", ".join(map(repr, self.args.served_model_name))
            raise APIError(f"The model `{name[:200]}` does not exist; this server has {served}.", 404, param="model")

    async def render(self, function: Callable[[], Result]) -> Result:
        """Call a function that renders or tokenises in a thread, so that the event loop goes on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def sampling_defaults(generation_config: dict[str, Any], args: ServeArgs) -> dict[str, Any]:
    """Sampling defaults of a server, by `--generation-config` and `--override-generation-config`.

    Args:
        generation_config: the content of the `generation_config.json` that `--generation-config` names.
        args: options of the command line.

    Raises:
        ConfigError: a value is not a number, or `max_new_tokens` no positive integer.
    """
    recommended = {} if args.generation_config == "vllm" else generation_config
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
    chosen = recommended | args.override_generation_config
    defaults = {name: chosen[name] for name in names if chosen.get(name) is not None}
    for name, value in defaults.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name}={value!r} of the generation config must be a number.")
    most = defaults.get("max_new_tokens")
    if most is not None and (not isinstance(most, int) or most < 1):
        raise ConfigError(f"max_new_tokens={most!r} of the generation config must be a positive integer.")
    return defaults


def most_tokens(defaults: dict[str, Any], args: ServeArgs) -> int | None:
    """The most tokens of any answer, which `max_new_tokens` is where an operator gives it, as in vLLM.

    In the model's own `generation_config.json` it is a default.

    Args:
        defaults: what `sampling_defaults` returns.
        args: options of the command line.
    """
    is_operators = args.generation_config not in ("auto", "vllm") or "max_new_tokens" in args.override_generation_config
    return defaults.get("max_new_tokens") if is_operators else None
