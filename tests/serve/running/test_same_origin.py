"""Endpoints that change the engine's state refuse browsers that ask for a page of another site, and nobody else."""

import asyncio

import httpx
import pytest
from starlette.requests import Request

from dflash_jax.serve.http.same_origin import same_origin_guard
from dflash_jax.serve.protocol import APIError

PAGE = "https://a.example"
CROSS_SITE = [
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site", "origin": PAGE},
    {"origin": PAGE},
    {"origin": "null"},
]


@pytest.mark.parametrize("headers", CROSS_SITE, ids=str)
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/flush_cache"), *(("POST", f"/{name}") for name in ("flush_cache", "start_profile", "stop_profile"))],
)
def test_a_page_of_another_site_changes_nothing(live, method, path, headers):
    """A browser sends these without asking the server first."""
    answer = httpx.request(method, live.base + path, headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "PermissionDeniedError")


def test_a_page_of_another_site_ends_nobodys_request(live):
    for headers, status in (*((headers, 403) for headers in CROSS_SITE), ({}, 200)):
        assert httpx.post(f"{live.base}/abort_request", json={"rid": "x"}, headers=headers).status_code == status


@pytest.mark.parametrize(
    "headers",
    [{}, {"sec-fetch-site": "none"}, {"sec-fetch-site": "same-origin", "origin": "http://b.example"}],
    ids=str,
)
def test_others_are_served(live, headers):
    """Scripts, a user who types the address, and the server's own page, also behind a proxy of another name."""
    for method in ("GET", "POST"):
        assert httpx.request(method, f"{live.base}/flush_cache", headers=headers).status_code == 200
    assert httpx.get(f"{live.base}/flush_cache", headers={"origin": live.base}).status_code == 200


@pytest.mark.parametrize("allowed", [(PAGE,), ("*",)])
def test_pages_that_the_operator_names_may(allowed):
    check = same_origin_guard(allowed)

    def ask(headers):
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        return check(Request({"type": "http", "path": "/flush_cache", "headers": raw}))

    asyncio.run(ask({"sec-fetch-site": "cross-site", "origin": PAGE}))
    for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "https://b.example"} if "*" not in allowed else None):
        if headers is not None:
            with pytest.raises(APIError):
                asyncio.run(ask(headers))


def test_no_origin_is_allowed_unless_named(live):
    for method in ("GET", "OPTIONS"):
        asks = {"origin": PAGE, "access-control-request-method": "GET"}
        answer = httpx.request(method, f"{live.base}/v1/models", headers=asks)
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
