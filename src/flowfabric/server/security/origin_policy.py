"""Checks on where a browser's request comes from: CORS origins, and the host names of a server without a token.

CORS: pages of other origins are refused unless the settings name their origin.

Host names: without a token, anyone who reaches the server may do anything. A web page whose name resolves to this
machine (DNS rebinding) could make the visitor's browser reach it, but the browser still sends the name of that page in
`Host`. So a server without a token answers 421 to names that are not its own. A server with a token skips the check: a
page cannot know the token. Mounted under a path of another application, it checks only the names it was given.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from flowfabric.server.errors import HttpError
from flowfabric.server.routing import Response
from flowfabric.server.settings import ServerSettings, is_loopback

Headers = tuple[tuple[str, str], ...]

ANY_HOST = "*"
_WILDCARD_ADDRESSES = frozenset({"0.0.0.0", "::", ""})


class Cors:
    """CORS response headers for the configured origins."""

    def __init__(self, settings: ServerSettings) -> None:
        self._any = "*" in settings.cors_origins
        self._origins = frozenset(settings.cors_origins)
        self._headers = "content-type" if settings.is_open else "content-type, authorization"

    @property
    def is_on(self) -> bool:
        return bool(self._origins)

    def response_headers(self, headers: dict[bytes, bytes]) -> Headers:
        """Return the CORS headers of a response."""
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
        """Return the response to a preflight request; None for any other request."""
        if not self.is_on or method != "OPTIONS" or b"access-control-request-method" not in headers:
            return None
        if self._any:
            extra = (("access-control-allow-methods", "*"), ("access-control-allow-headers", "*"))
        else:
            extra = (
                ("access-control-allow-methods", "GET, POST, PUT"),
                ("access-control-allow-headers", self._headers),
            )
        return Response(200, headers=(*self.response_headers(headers), *extra))


class HostFilter:
    """Refuses host names that are not those of a server without a token."""

    def __init__(self, settings: ServerSettings) -> None:
        public = urlsplit(settings.public_url).hostname if settings.public_url else None
        self._names = frozenset(name.lower() for name in (*settings.allowed_hosts, public) if name)
        self._listen_host = settings.host.lower()
        self._is_on = settings.is_open and ANY_HOST not in settings.allowed_hosts

    def check(self, scope: Mapping[str, Any], names: list[bytes]) -> None:
        """Raise 421 if a Host header names another server. Browsers always send one."""
        if not self._is_on or (scope.get("root_path") and not self._names):
            return
        for name in names:
            host = parse_host(name.decode("latin-1"))
            if host is None or not self._is_own_name(host, scope.get("server")):
                raise HttpError(
                    421,
                    "this server has no token and does not answer to this Host: "
                    "ask it by its address, or set FF_PUBLIC_URL, FF_ALLOWED_HOSTS or FF_API_TOKEN",
                    kind="misdirected_request",
                    retryable=False,
                )

    def _is_own_name(self, host: str, server: Any) -> bool:
        if is_loopback(host) or host in self._names or host == self._listen_host:
            return True
        if server and host == str(server[0]).lower():  # the local address of the connection
            return True
        return self._listen_host in _WILDCARD_ADDRESSES and _is_address(host)


def parse_host(text: str) -> str | None:
    """Return the host name of a Host header without its port; None if it is malformed."""
    try:
        parts = urlsplit(f"//{text}")
        if parts.username is not None or parts.path or parts.query or parts.fragment:
            return None
        _ = parts.port  # raises ValueError if it is malformed
    except ValueError:
        return None
    return parts.hostname.rstrip(".") if parts.hostname else None


def _is_address(host: str) -> bool:
    """True for an IP address, which no DNS record can redirect."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
