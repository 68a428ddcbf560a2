"""Encoding of the lists that a suspension row stores as JSON: waitpoints, satisfying signals, progress."""

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
    """The position of a signal: its waitpoint and its sequence number there."""

    waitpoint_id: str
    seq: int


def bound_waitpoints(suspension: Suspension | None) -> list[WaitpointRef]:
    """Return the waitpoints of the suspension, the primary one first."""
    text = None if suspension is None else suspension.waitpoints
    return [] if text is None else msgspec.json.decode(text, type=list[WaitpointRef])


def satisfiers(suspension: Suspension | None) -> list[SignalRef]:
    """Return the signals that counted, in order of acceptance."""
    text = None if suspension is None else suspension.satisfiers
    return [] if text is None else msgspec.json.decode(text, type=list[SignalRef])


def closing_signals(suspension: Suspension | None) -> list[SignalRef]:
    """Return the signals that closed the suspension, in order of acceptance; none if no signal closed it."""
    return [] if suspension is None or suspension.closer_signal_id is None else satisfiers(suspension)


def decode_progress(text: str | None) -> dict[str, list[str]]:
    """Decode the progress of a condition."""
    return {} if text is None else msgspec.json.decode(text, type=dict[str, list[str]])


def encode_or_none(value: Any) -> str | None:
    """Encode a list or mapping as stored text; None if it is empty."""
    return msgspec.json.encode(value).decode() if value else None


def key_digest(key: str) -> str:
    """Return the hash under which an idempotency key is stored."""
    return hashlib.sha256(key.encode()).hexdigest()
