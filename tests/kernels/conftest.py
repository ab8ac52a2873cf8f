"""The implementations this machine has: on a CPU the reference and interpreted Triton, on a GPU all, compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest

import pallas_kernels
from pallas_kernels.paged_attention import mosaic
from pallas_kernels.paged_attention.arguments import checked

ON_GPU = jax.default_backend() == "gpu"
ATTENTION = ["reference", "triton", "mosaic"] if ON_GPU else ["reference", "triton"]
WRITERS = ["reference", "triton"]


@functools.cache
def _compiled(function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    options = ("mask", "window") if function is pallas_kernels.paged_attention else ()
    return jax.jit(functools.partial(function, **static), static_argnames=options)


def _run(function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    interpret = not ON_GPU and implementation == "triton"
    return _compiled(function, implementation=implementation, interpret=interpret)


@pytest.fixture(params=ATTENTION)
def attend(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """One implementation of paged attention, jitted; skips a call that the implementation refuses."""
    run = _run(pallas_kernels.paged_attention, request.param)
    if request.param != "mosaic":
        return run

    def unless_refused(*arguments: Any, **options: Any) -> Any:
        if reason := mosaic.refusal(checked(*arguments, scale=None, **options)):
            pytest.skip(reason)
        return run(*arguments, **options)

    return unless_refused


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """One implementation of the page write, jitted."""
    return _run(pallas_kernels.write_kv, request.param)
