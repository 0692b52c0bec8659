"""Calls from web pages of other origins: off unless origins are configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.gateway.errors import Headers

METHODS = b"GET, POST, DELETE"
SEEN = b"x-request-id, x-collm-adapter-version, retry-after, x-should-retry"
MAX_AGE = b"600"  # seconds that a browser may remember the answer


class Cors:
    """``origins`` such as ``https://chat.example``; ``*`` allows every one. Cookies never go
    along: keys do, in a header that a page must know."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(o.rstrip("/").encode() for o in origins)

    def headers(self, asked: Mapping[bytes, bytes]) -> Headers:
        """For every answer to an allowed page; none for others."""
        if not self._origins:
            return []
        found: Headers = [(b"vary", b"Origin")]
        origin = asked.get(b"origin")
        if origin is not None and (b"*" in self._origins or origin in self._origins):
            found.append((b"access-control-allow-origin", origin))
            found.append((b"access-control-expose-headers", SEEN))
        return found

    def preflight(self, method: str, asked: Mapping[bytes, bytes]) -> Headers | None:
        """What a browser asks before it calls, which goes without a key; None: it is no such
        question, or not from an allowed page."""
        if method != "OPTIONS" or b"access-control-request-method" not in asked:
            return None
        allowed = self.headers(asked)
        if len(allowed) < 2:
            return None
        wanted = asked.get(b"access-control-request-headers", b"")
        return [
            (b"access-control-allow-methods", METHODS),
            (b"access-control-allow-headers", wanted),
            (b"access-control-max-age", MAX_AGE),
        ]
