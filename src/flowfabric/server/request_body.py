"""Request bodies: read within limits of size and time, and decoded into the schema of the route."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec

from flowfabric import json_limits
from flowfabric.server.errors import BodyTooLarge, HttpError
from flowfabric.server.request import Receive, Request
from flowfabric.server.routing import FIELDS_HEADER, Route

_JSON_TYPE = re.compile(rb"application/(?:[^;\s]+\+)?json\s*(?:;.*)?", re.IGNORECASE | re.DOTALL).fullmatch
_OCTETS_TYPE = re.compile(rb"application/octet-stream\s*(?:;.*)?", re.IGNORECASE | re.DOTALL).fullmatch
_FIELDS = FIELDS_HEADER.encode()
_UNSUPPORTED = "invalid JSON: Unsupported Media Type"
_MALFORMED = "invalid JSON: Bad Request"
_UNPROCESSABLE = "invalid JSON: Unprocessable Entity"
BODY_TIMEOUT_S = 60.0


async def read_body(request: Request[Any], route: Route) -> bytes:
    """Read the raw body; raise 413, 415 or 408 if it is too large, of another type, or takes too long."""
    limit = route.limit
    length = request.headers.get(b"content-length")
    if length is not None and length.isdigit() and (len(length) > 18 or int(length) > limit):
        raise BodyTooLarge(limit, route.path)
    if route.decoder is not None and not _is_octets(request, route) and not _JSON_TYPE(_content_type(request)):
        raise HttpError(415, _UNSUPPORTED)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            message = await request.receive()
            body: bytes = message.get("body", b"")
            if message.get("more_body"):
                body = await _read_rest(request.receive, body, limit, route.path)
    except TimeoutError:
        raise HttpError(408, "the body took too long", connection="close") from None
    if len(body) > limit:
        raise BodyTooLarge(limit, route.path)
    return body


def decode_body(request: Request[Any], route: Route, body: bytes) -> Any:
    """Decode the body; raise 400 if it is malformed, 422 if it does not fit the schema, and say where."""
    if route.decoder is None:
        return body
    is_octets = _is_octets(request, route)
    fields = request.headers.get(_FIELDS, b"{}")
    try:
        json_limits.check_numbers(fields if is_octets else body)
        return _decode_octets(body, fields, route) if is_octets else route.decoder.decode(body)
    except msgspec.ValidationError as fault:
        if is_octets or _is_json(body):
            raise HttpError(422, _UNPROCESSABLE, detail=_misfit(fault)) from None
        raise HttpError(400, _MALFORMED) from None
    except json_limits.NumberTooLong as fault:
        raise HttpError(400, f"invalid JSON: {fault}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise HttpError(400, _MALFORMED) from None


def _misfit(fault: msgspec.ValidationError) -> str:
    """Return where and why a body does not fit, as in `spec.overlap: invalid enum value 'often'`."""
    why, _, place = str(fault).partition(" - at `$")
    why = why[:1].lower() + why[1:]
    return f"{place.strip('.`')}: {why}" if place else why


def _content_type(request: Request[Any]) -> bytes:
    return request.headers.get(b"content-type", b"")


def _is_octets(request: Request[Any], route: Route) -> bool:
    """True if the body is the raw bytes of one field."""
    return route.octets_field is not None and _OCTETS_TYPE(_content_type(request)) is not None


def _is_json(body: bytes) -> bool:
    """True if the whole body is well-formed; the decoder reports a wrong shape before it has read to the end."""
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _decode_octets(octets: bytes, fields: bytes, route: Route) -> Any:
    """Build the request from the raw bytes of one field and the other fields of the header."""
    values = msgspec.json.decode(fields, type=dict[str, Any])
    if route.octets_field in values:
        raise msgspec.ValidationError(f"{route.octets_field} is given twice")
    values[route.octets_field or ""] = octets
    return msgspec.convert(values, route.body)


async def _read_rest(receive: Receive, body: bytes, limit: int, route: str) -> bytes:
    parts, size, more = [body], len(body), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HttpError(400, _MALFORMED)
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise BodyTooLarge(limit, route)
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)
