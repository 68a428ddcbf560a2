"""Shapes of the wire, read: variants by their names, and the records that the engine itself would return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from flowfabric import errors
from flowfabric.api.encoding import variant_name
from flowfabric.client.errors import BACKEND

T = TypeVar("T")


def decode_as(body: bytes, kind: type[T]) -> T:
    """A whole answer of one shape."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as fault:
        raise _nonsense(fault) from fault


def decode_variant(body: bytes, *kinds: Any, **named: Any) -> Any:
    """One of several answers: an object with one key, its name, or the bare name of one without fields."""
    return convert_variant(decode_as(body, Any), *kinds, **named)


def convert_variant(told: Any, *kinds: Any, **named: Any) -> Any:
    """The same of what was decoded already."""
    known: Mapping[str, Any] = {variant_name(kind): kind for kind in kinds} | named
    name, fields = (told, {}) if isinstance(told, str) else next(iter(told.items()), ("", {}))
    if name not in known:
        raise _nonsense(name)
    try:
        return msgspec.convert(fields, known[name])
    except msgspec.ValidationError as fault:
        raise _nonsense(fault) from fault


def _nonsense(what: object) -> errors.StoreUnavailable:
    words = f"the server's answer makes no sense here: {what}"
    return errors.StoreUnavailable(words, backend=BACKEND, source=errors.StoreFault.PROTOCOL, in_doubt=True)
