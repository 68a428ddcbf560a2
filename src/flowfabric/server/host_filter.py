"""Under which names an open server may be asked: 421 for all others.

Without a token, whoever reaches the server may do anything. A web page that lets its own name point to this machine
(DNS rebinding) could let the visitor's browser reach it; but the browser still tells that page's name in `Host`.

The check is that of an unauthenticated server. A server with a token needs none: a page cannot know the token. Mounted
under a path of another application, which has names and callers of its own, it checks only the names it was given.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from flowfabric.server.errors import HttpError
from flowfabric.server.settings import ServerSettings, is_loopback

ANY_HOST = "*"
_EVERYWHERE = frozenset({"0.0.0.0", "::", ""})


class HostFilter:
    """The names of one server."""

    def __init__(self, settings: ServerSettings) -> None:
        public = urlsplit(settings.public_url).hostname if settings.public_url else None
        self._given = frozenset(name.lower() for name in (*settings.allowed_hosts, public) if name)
        self._listens = settings.host.lower()
        self._is_on = settings.is_open and ANY_HOST not in settings.allowed_hosts

    def check(self, scope: Mapping[str, Any], names: list[bytes]) -> None:
        """Refuse a request that was sent to a name that is not this server's; browsers always tell one."""
        if not self._is_on or (scope.get("root_path") and not self._given):
            return
        for name in names:
            host = parse_host(name.decode("latin-1"))
            if host is None or not self._is_ours(host, scope.get("server")):
                raise HttpError(
                    421,
                    "this server has no token and does not answer to this Host: "
                    "ask it by its address, or set FF_PUBLIC_URL, FF_ALLOWED_HOSTS or FF_API_TOKEN",
                    kind="misdirected_request",
                    retryable=False,
                )

    def _is_ours(self, host: str, server: Any) -> bool:
        if is_loopback(host) or host in self._given or host == self._listens:
            return True
        if server and host == str(server[0]).lower():  # where the connection came in
            return True
        return self._listens in _EVERYWHERE and _is_address(host)


def parse_host(text: str) -> str | None:
    """The name in a Host header, without its port; None when it is none."""
    try:
        parts = urlsplit(f"//{text}")
        if parts.username is not None or parts.path or parts.query or parts.fragment:
            return None
        _ = parts.port  # raises when it is none
    except ValueError:
        return None
    return parts.hostname.rstrip(".") if parts.hostname else None


def _is_address(host: str) -> bool:
    """True if no name is looked up for this host, so that nobody can let it point elsewhere."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
