"""Which pages of other origins a browser may let ask: none, unless some are named."""

from __future__ import annotations

from flowfabric.server.routing import Response
from flowfabric.server.settings import ServerSettings

Headers = tuple[tuple[str, str], ...]


class Cors:
    """The headers for a request's origin."""

    def __init__(self, settings: ServerSettings) -> None:
        self._any = "*" in settings.cors_origins
        self._origins = frozenset(settings.cors_origins)
        self._headers = "content-type" if settings.is_open else "content-type, authorization"

    @property
    def is_on(self) -> bool:
        return bool(self._origins)

    def response_headers(self, headers: dict[bytes, bytes]) -> Headers:
        """What to add to an answer."""
        origin = headers.get(b"origin")
        if origin is None:
            return ()
        if self._any:
            return (("access-control-allow-origin", "*"), ("access-control-expose-headers", "*"))
        text = origin.decode("latin-1")
        if text in self._origins:
            return (("access-control-allow-origin", text), ("vary", "origin"))
        return (("vary", "origin"),)

    def preflight(self, method: str, headers: dict[bytes, bytes]) -> Response | None:
        """The answer to a browser that asks first."""
        if not self.is_on or method != "OPTIONS" or b"access-control-request-method" not in headers:
            return None
        if self._any:
            more = (("access-control-allow-methods", "*"), ("access-control-allow-headers", "*"))
        else:
            more = (
                ("access-control-allow-methods", "GET, POST, PUT"),
                ("access-control-allow-headers", self._headers),
            )
        return Response(200, headers=(*self.response_headers(headers), *more))
