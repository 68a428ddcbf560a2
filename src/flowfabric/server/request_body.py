"""Bodies of requests: received within limits of size and time, and decoded into what the route expects."""

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


async def read_body(ask: Request[Any], operation: Route) -> bytes:
    """The body as it was sent; 413, 415 or 408 when it is too large, of another type, or takes too long."""
    limit = operation.max_body_bytes
    length = ask.headers.get(b"content-length")
    if length is not None and length.isdigit() and (len(length) > 18 or int(length) > limit):
        raise BodyTooLarge(limit, operation.path)
    if operation.decoder is not None and not _is_octets(ask, operation) and not _JSON_TYPE(_type(ask)):
        raise HttpError(415, _UNSUPPORTED)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            message = await ask.receive()
            body: bytes = message.get("body", b"")
            if message.get("more_body"):
                body = await _rest(ask.receive, body, limit, operation.path)
    except TimeoutError:
        raise HttpError(408, "the body took too long", connection="close") from None
    if len(body) > limit:
        raise BodyTooLarge(limit, operation.path)
    return body


def decode_body(ask: Request[Any], operation: Route, body: bytes) -> Any:
    """What the route expects; 400 or 422 when the body is no such thing."""
    if operation.decoder is None:
        return body
    is_octets = _is_octets(ask, operation)
    fields = ask.headers.get(_FIELDS, b"{}")
    try:
        json_limits.check_numbers(fields if is_octets else body)
        return _around(body, fields, operation) if is_octets else operation.decoder.decode(body)
    except msgspec.ValidationError:
        raise (HttpError(422, _UNPROCESSABLE) if is_octets or _is_json(body) else HttpError(400, _MALFORMED)) from None
    except json_limits.NumberTooLong as fault:
        raise HttpError(400, f"invalid JSON: {fault}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise HttpError(400, _MALFORMED) from None


def _type(ask: Request[Any]) -> bytes:
    return ask.headers.get(b"content-type", b"")


def _is_octets(ask: Request[Any], operation: Route) -> bool:
    """Whether the body is one field of the request, as the bytes themselves."""
    return operation.octets_field is not None and _OCTETS_TYPE(_type(ask)) is not None


def _is_json(body: bytes) -> bool:
    """Whether all of a body is well-formed; of a wrong shape the decoder tells before it has read to the end."""
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _around(octets: bytes, fields: bytes, operation: Route) -> Any:
    """The body of which one field came as bytes, and the others in a header."""
    given = msgspec.json.decode(fields, type=dict[str, Any])
    if operation.octets_field in given:
        raise msgspec.ValidationError(f"{operation.octets_field} is given twice")
    given[operation.octets_field or ""] = octets
    return msgspec.convert(given, operation.body)


async def _rest(receive: Receive, body: bytes, limit: int, route: str) -> bytes:
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
