"""encoding: split from flowfabric.rules.waits."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from flowfabric.model.suspension import Suspension


class WaitpointRef(msgspec.Struct, frozen=True, array_like=True):
    """A waitpoint of a suspension."""

    waitpoint_id: str
    waitpoint_key: str


class SignalRef(msgspec.Struct, frozen=True, array_like=True):
    """A signal, by where it stands."""

    waitpoint_id: str
    seq: int


def bound_waitpoints(root: Suspension | None) -> list[WaitpointRef]:
    """The waitpoints of the suspension, the primary first."""
    text = None if root is None else root.waitpoints
    return [] if text is None else msgspec.json.decode(text, type=list[WaitpointRef])


def satisfiers(root: Suspension | None) -> list[SignalRef]:
    """The signals that counted, in the order of acceptance."""
    text = None if root is None else root.satisfiers
    return [] if text is None else msgspec.json.decode(text, type=list[SignalRef])


def closing_signals(root: Suspension | None) -> list[SignalRef]:
    """The signals that closed the suspension, in the order of acceptance; none when something else did, or nothing."""
    return [] if root is None or root.closer_signal_id is None else satisfiers(root)


def decode_progress(text: str | None) -> dict[str, list[str]]:
    """How far a condition has come."""
    return {} if text is None else msgspec.json.decode(text, type=dict[str, list[str]])


def encode_or_none(value: Any) -> str | None:
    """A list or mapping as the text that a row keeps; nothing is no text."""
    return msgspec.json.encode(value).decode() if value else None


def key_digest(key: str) -> str:
    """What an idempotency key is remembered by."""
    return hashlib.sha256(key.encode()).hexdigest()
