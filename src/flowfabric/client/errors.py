"""Errors of the server, raised again in the client.

Only a response with the header `x-ff-error` comes from the server. Login pages, firewalls and gateways answer with
statuses of their own, which say nothing about the request itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from flowfabric import errors

BACKEND = "HTTP"

# What the status of a foreign response says about the connection.
_SOURCES = {
    401: errors.StoreFault.AUTH,
    403: errors.StoreFault.AUTH,
    407: errors.StoreFault.AUTH,
    511: errors.StoreFault.AUTH,
    408: errors.StoreFault.TIMEOUT,
    504: errors.StoreFault.TIMEOUT,
    429: errors.StoreFault.TRANSPORT,
    502: errors.StoreFault.TRANSPORT,
    503: errors.StoreFault.TRANSPORT,
}


def error_from_headers(headers: Mapping[str, str]) -> errors.FabricError | None:
    """Return the error in the error header; None if the response is not from the server."""
    header = headers.get("x-ff-error")
    if header is None:
        return None
    try:
        return decode_error(msgspec.json.decode(header, type=dict[str, Any]))
    except (msgspec.DecodeError, KeyError):
        return None


def proxy_error(status: int, body: bytes) -> errors.StoreUnavailable:
    """Return the error for a response without the error header: a proxy answered, or the server failed.

    The outcome is unknown, because the request may have been forwarded.
    """
    who = "the server or something before it" if status >= 500 else "something before the server"
    message = f"{who} answered {status}"
    if text := _error_text(body):
        message += f": {text}"
    source = _SOURCES.get(status, errors.StoreFault.OTHER if status == 500 else errors.StoreFault.PROTOCOL)
    return errors.StoreUnavailable(message, backend=BACKEND, source=source, in_doubt=True)


def error_in_batch(entry: Mapping[str, Any]) -> errors.FabricError | None:
    """Return the error in one entry of a batch; None if the entry is a result."""
    return None if "code" not in entry else decode_error(entry)


def decode_error(entry: Mapping[str, Any]) -> errors.FabricError:
    """Build an error from its code, detail and facts."""
    code, detail, facts = str(entry["code"]), str(entry.get("detail", "")), dict(entry.get("facts") or {})
    kind: type[errors.FabricError] | None = errors.NotFound if "entity" in facts else errors.by_kind.get(code)
    if kind is not None:
        try:
            return kind(detail=detail, **facts)
        except (TypeError, ValueError):  # a fact that cannot be sent
            pass
    return errors.StoreUnavailable(f"{code}: {detail}" if detail else code, backend=BACKEND, in_doubt=True)


def _error_text(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body, type=dict[str, Any])["error"])
    except (msgspec.DecodeError, KeyError):
        return ""
