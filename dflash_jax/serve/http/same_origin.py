"""A guard of endpoints that change the server's state against pages of other sites."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from fastapi import Request

from dflash_jax.serve.protocol import APIError


def same_origin_guard(allowed_origins: Sequence[str]) -> Callable[[Request], Awaitable[None]]:
    """A dependency that refuses requests which a browser sends for a page of another site.

    Any page can make a browser send a GET, or a POST without a body, to a server that only the browser can reach; the
    page cannot read the answer, but the state has changed. Browsers say where such a request comes from, in
    `Sec-Fetch-Site`, older ones in `Origin`. Clients that are not browsers send neither, and are let in.

    Args:
        allowed_origins: pages that the operator trusts (`--allowed-origins`); "*" trusts all that name themselves.

    Raises:
        APIError: from the dependency; 403.
    """

    async def check(request: Request) -> None:
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        if origin is not None and ("*" in allowed_origins or origin in allowed_origins):
            return
        if site is not None:
            is_foreign = site not in ("same-origin", "none")  # "none": the user has typed the address
        else:
            is_foreign = origin is not None and urlsplit(origin).netloc != request.headers.get("host")
        if is_foreign:
            raise APIError(
                f"{request.url.path} is refused to pages of other sites: call it from no browser, or start the server "
                "with --allowed-origins.",
                403,
            )

    return check
