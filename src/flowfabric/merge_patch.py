"""JSON merge patch (RFC 7396) of summary documents; numbers keep all their digits."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec

from flowfabric import json_limits
from flowfabric.errors import Corruption, FabricError, InvalidInput

MAX_DEPTH = 16
NULL = "__ff_null__"  # in a patch: sets a JSON null, where a plain null would delete

_decoder = msgspec.json.Decoder(float_hook=Decimal)
_encoder = msgspec.json.Encoder(decimal_format="number")
_FAULTS = (msgspec.DecodeError, ValueError, ArithmeticError)


def decode_patch(payload: bytes) -> dict[str, Any] | FabricError:
    """Return the patch, or what is wrong with it."""
    try:
        json_limits.check_numbers(payload)
        patch = _decoder.decode(payload)
    except RecursionError:
        is_object = payload.lstrip()[:1] == b"{"
        return InvalidInput("patch_depth_exceeded" if is_object else "patch must be a JSON object")
    except _FAULTS:
        return InvalidInput("patch payload is not valid JSON")
    if not isinstance(patch, dict):
        return InvalidInput("patch must be a JSON object")
    return InvalidInput("patch_depth_exceeded") if _is_deeper(patch, MAX_DEPTH) else patch


def decode_document(text: str) -> dict[str, Any] | FabricError:
    """Return the stored document, or `Corruption`."""
    try:
        document = _decoder.decode(text)
    except (RecursionError, *_FAULTS):
        return Corruption("summary document")
    return document if isinstance(document, dict) else Corruption("summary document")


def encode_document(document: dict[str, Any]) -> str:
    """Encode the document as stored text."""
    return _encoder.encode(document).decode()


def merge(document: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return the document after the patch; neither is modified."""
    merged = dict(document)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict):
            nested = merged.get(name)
            merged[name] = merge(nested if isinstance(nested, dict) else {}, value)
        else:
            merged[name] = _resolve_nulls(value)
    return merged


def _resolve_nulls(value: Any) -> Any:
    """Return a replacing value with the placeholder for null resolved at any depth."""
    if isinstance(value, dict):
        return {name: _resolve_nulls(child) for name, child in value.items()}
    if isinstance(value, list):
        return [_resolve_nulls(child) for child in value]
    return None if value == NULL else value


def _is_deeper(value: Any, levels: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(child, dict | list) and (levels == 0 or _is_deeper(child, levels - 1)) for child in children)
