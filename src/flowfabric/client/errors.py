"""Refusals as they were: a server's answer becomes the error that the engine raised there.

Only an answer with our error header is a verdict. Login pages, firewalls and gateways answer with statuses of their
own, which say nothing about the request itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from flowfabric import errors

BACKEND = "HTTP"

# What an answer that is not the server's says about the way to it.
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
    """The refusal of our server, which names it in the error header; None for an answer of anybody else."""
    line = headers.get("x-ff-error")
    if line is None:
        return None
    try:
        return decode_error(msgspec.json.decode(line, type=dict[str, Any]))
    except (msgspec.DecodeError, KeyError):
        return None


def proxy_error(status: int, body: bytes) -> errors.StoreUnavailable:
    """What an answer without the error header means: a proxy stood in the way, or the server broke. The outcome is
    unknown, as the request may have been passed on."""
    who = "the server or something before it" if status >= 500 else "something before the server"
    words = f"{who} answered {status}"
    if text := _words(body):
        words += f": {text}"
    source = _SOURCES.get(status, errors.StoreFault.OTHER if status == 500 else errors.StoreFault.PROTOCOL)
    return errors.StoreUnavailable(words, backend=BACKEND, source=source, in_doubt=True)


def error_in_batch(told: Mapping[str, Any]) -> errors.FabricError | None:
    """The refusal that stands among other answers; None when this is another answer."""
    return None if "code" not in told else decode_error(told)


def decode_error(told: Mapping[str, Any]) -> errors.FabricError:
    """An error from its code, detail and facts."""
    code, detail, facts = str(told["code"]), str(told.get("detail", "")), dict(told.get("facts") or {})
    kind: type[errors.FabricError] | None = errors.NotFound if "entity" in facts else errors.by_kind.get(code)
    if kind is not None:
        try:
            return kind(detail=detail, **facts)
        except (TypeError, ValueError):  # a fact that did not travel
            pass
    return errors.StoreUnavailable(f"{code}: {detail}" if detail else code, backend=BACKEND, in_doubt=True)


def _words(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body, type=dict[str, Any])["error"])
    except (msgspec.DecodeError, KeyError):
        return ""
