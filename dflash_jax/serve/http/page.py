"""The files of the page at `/`, a chat that shows what speculation does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

FOLDER = Path(__file__).parent.parent / "page"
FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    **{f"/{name}": (name, "text/javascript") for name in ("page.js", "answer.js", "api.js", "dom.js")},
}
# All content comes from this server, and no script that a model writes can run.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_router() -> APIRouter:
    """The endpoints of the page's files; no other file can be reached."""
    router = APIRouter(include_in_schema=False)
    for path, (name, media_type) in FILES.items():
        router.add_api_route(path, _sender(FOLDER / name, media_type), methods=["GET"], response_model=None)
    return router


def _sender(path: Path, media_type: str) -> Callable[[], Awaitable[Response]]:
    content = path.read_bytes()

    async def send() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return send
