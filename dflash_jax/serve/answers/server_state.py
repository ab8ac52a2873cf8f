"""What every route of the server works with."""

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

Result = TypeVar("Result")


@dataclass(eq=False)
class ServerState:
    """The server's parts.

    Attributes:
        args: of the command line.
        renderer: of the model's folder; used by `render` alone.
        client: of the engine.
        metrics: of all requests.
        defaults: sampling defaults, where a request gives none.
        running: ids in the engine of the requests that run, by the ids that clients know.
        created: Unix time of the start, seconds.
    """

    args: ServeArgs
    renderer: Renderer
    client: EngineClient
    metrics: Metrics
    defaults: dict[str, Any]
    running: dict[str, list[str]] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    _intake: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "dflash-render"))

    @property
    def ready(self) -> Ready:
        """What the engine said of itself.

        Raises:
            APIError: 503; there is no engine.
        """
        if self.client.ready is None:
            raise APIError(self.client.cause, 503)
        return self.client.ready

    @property
    def model(self) -> str:
        """The name that answers have."""
        return self.args.served_model_name[0]

    def check_model(self, name: str | None) -> None:
        """A request may leave the model out; one that names it must mean this.

        Raises:
            APIError: 404.
        """
        if name is not None and name not in self.args.served_model_name:
            served = ", ".join(map(repr, self.args.served_model_name))
            raise APIError(f"The model `{name[:200]}` does not exist; this server has {served}.", 404, param="model")

    async def render(self, function: Callable[[], Result]) -> Result:
        """Do what may take long with templates and tokenizers, one at a time, while others' streams go on."""
        return await asyncio.get_running_loop().run_in_executor(self._intake, function)


def sampling_defaults(generation_config: dict[str, Any], args: ServeArgs) -> dict[str, Any]:
    """Sampling defaults of a server: of the model's `generation_config.json` unless told otherwise.

    Raises:
        ConfigError: a value is no number.
    """
    own = {} if args.generation_config == "vllm" else generation_config
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
    chosen = own | args.override_generation_config
    defaults = {name: chosen[name] for name in names if chosen.get(name) is not None}
    for name, value in defaults.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name}={value!r} of the generation config must be a number.")
    return defaults
