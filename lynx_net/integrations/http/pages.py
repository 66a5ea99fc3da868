"""The page to watch, at `/`: files of this package, from memory. The page itself reads /events."""

from __future__ import annotations

import hashlib
from importlib import resources

from aiohttp import web

__all__ = ["PAGE_PATHS", "add_page"]

_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

PAGE_PATHS = tuple(_FILES)
"""They hold nothing of any request, so they need no key; the page asks for one when /events does."""

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # the script makes no markup from text
        "trusted-types 'none'",
    )
)

_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _File:
    def __init__(self, name: str, media_type: str) -> None:
        self._body = (resources.files("lynx_net.integrations.http") / "page" / name).read_bytes()
        self._etag = hashlib.sha256(self._body).hexdigest()[:16]
        self._media_type = media_type

    async def answer(self, request: web.Request) -> web.Response:
        known = {tag.value for tag in request.if_none_match or ()}
        fresh = self._etag in known
        response = web.Response(status=304 if fresh else 200, body=None if fresh else self._body, headers=_HEADERS)
        if not fresh:
            response.content_type, response.charset = self._media_type, "utf-8"
        response.etag = self._etag
        return response


def add_page(router: web.UrlDispatcher) -> None:
    """Serve the page and its files."""
    for path, (name, media_type) in _FILES.items():
        router.add_get(path, _File(name, media_type).answer)
