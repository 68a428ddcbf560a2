"""Refusals as they were: a server's answer becomes the error that the engine raised there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from flowfabric import errors

BACKEND = "HTTP"

_FAMILIES: dict[int, type[errors.FabricError]] = {
    400: errors.InvalidInput,
    401: errors.Unauthorized,
    403: errors.Unauthorized,
    413: errors.PayloadTooLarge,
    415: errors.InvalidInput,
    422: errors.InvalidInput,
    431: errors.InvalidInput,
}


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> errors.FabricError:
    """What a status beyond 399 means."""
    exact = _exact(headers.get("x-ff-error"))
    if exact is not None:
        return exact
    words = _words(body) or f"the server answered {status}"
    if (known := _FAMILIES.get(status)) is not None:
        return known(words)
    if status == 404:
        return errors.NotFound("route", words) if not body else errors.NotFound("execution", words)
    if status == 429:
        return errors.ResourceExhausted("requests", detail=words)
    source = errors.StoreFault.TIMEOUT if status in (408, 504) else errors.StoreFault.TRANSPORT
    if status == 500:
        source = errors.StoreFault.OTHER
    return errors.StoreUnavailable(words, backend=BACKEND, source=source, in_doubt=True)


def among_answers(told: Mapping[str, Any]) -> errors.FabricError | None:
    """The refusal that stands among other answers; None when this is another answer."""
    return None if "code" not in told else made(told)


def made(told: Mapping[str, Any]) -> errors.FabricError:
    """An error from its code, detail and facts."""
    code, detail, facts = str(told["code"]), str(told.get("detail", "")), dict(told.get("facts") or {})
    kind: type[errors.FabricError] | None = errors.NotFound if "entity" in facts else errors.by_kind.get(code)
    if kind is not None:
        try:
            return kind(detail=detail, **facts)
        except (TypeError, ValueError):  # a fact that did not travel
            pass
    return errors.StoreUnavailable(f"{code}: {detail}" if detail else code, backend=BACKEND, in_doubt=True)


def _exact(line: str | None) -> errors.FabricError | None:
    if line is None:
        return None
    try:
        return made(msgspec.json.decode(line, type=dict[str, Any]))
    except (msgspec.DecodeError, KeyError):
        return None


def _words(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body, type=dict[str, Any])["error"])
    except (msgspec.DecodeError, KeyError):
        return ""
