"""Decoding of responses: structs, and variants by name."""

from __future__ import annotations

from typing import Any, TypeVar, overload

import msgspec

from flowfabric import errors
from flowfabric.api.encoding import variant_name
from flowfabric.client.errors import BACKEND

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")
W = TypeVar("W")


def decode_as(body: bytes, kind: type[T]) -> T:
    """Decode a response body of one type."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as fault:
        raise _protocol_error(fault) from fault


@overload
def decode_variant(body: bytes, kind: type[T], /) -> T: ...
@overload
def decode_variant(body: bytes, kind: type[T], other: type[U], /) -> T | U: ...
@overload
def decode_variant(body: bytes, kind: type[T], other: type[U], third: type[V], /) -> T | U | V: ...
@overload
def decode_variant(body: bytes, kind: type[T], other: type[U], third: type[V], last: type[W], /) -> T | U | V | W: ...
@overload
def decode_variant(body: bytes, *kinds: Any, **named: Any) -> Any: ...
def decode_variant(body: bytes, *kinds: Any, **named: Any) -> Any:
    """Decode a response body that is one of several variants (see `api.encoding`)."""
    return convert_variant(decode_as(body, Any), *kinds, **named)


def convert_variant(value: Any, *kinds: Any, **named: Any) -> Any:
    """Convert a decoded value that is one of several variants."""
    known: dict[str, Any] = {variant_name(kind): kind for kind in kinds} | named
    name, fields = (value, {}) if isinstance(value, str) else next(iter(value.items()), ("", {}))
    if name not in known:
        raise _protocol_error(name)
    try:
        return msgspec.convert(fields, known[name])
    except msgspec.ValidationError as fault:
        raise _protocol_error(fault) from fault


def _protocol_error(cause: object) -> errors.StoreUnavailable:
    message = f"the server's answer makes no sense here: {cause}"
    return errors.StoreUnavailable(message, backend=BACKEND, source=errors.StoreFault.PROTOCOL, in_doubt=True)
