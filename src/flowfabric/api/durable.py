"""Schemas of durable functions: recorded steps, gates, parking."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from flowfabric.api.encoding import HolderRequest, Natural, Octets, RedactedRepr, decode_octets
from flowfabric.api.signals import ObservedSignalItem
from flowfabric.model.gate import Gate, GateKind, GateMemo, StepMemo


class RecordStepRequest(HolderRequest, frozen=True):
    name: str
    occurrence: Natural
    result: Octets | None = None
    result_b64: bytes | None = None
    encoding: str | None = None
    digest: str | None = None

    def __post_init__(self) -> None:
        decode_octets("result", self.result, self.result_b64)


class ReadStepsResponse(msgspec.Struct, frozen=True):
    steps: list[StepMemo]


class OpenGateRequest(HolderRequest, frozen=True):
    """A gate by name, of kind `signals`, `mailbox`, `children` or `timer`, with the fields of that kind."""

    name: str
    kind: GateKind
    expires_in_ms: Natural | None = None
    expires_at: Natural | None = None
    condition: Any = None
    waitpoints: tuple[tuple[str, str], ...] = ()
    mailbox: str | None = None
    children: tuple[str, ...] = ()
    need: Natural = 0
    any_outcome: bool = False


class GateLink(RedactedRepr, msgspec.Struct, frozen=True):
    waitpoint_id: str
    waitpoint_key: str
    token: str


class OpenGateResponse(msgspec.Struct, frozen=True):
    """A gate that is still open, with the tokens of its waitpoints."""

    variant: ClassVar[str] = "OpenedGate"

    name: str
    gate: Gate
    links: list[GateLink]


class ParkRequest(HolderRequest, frozen=True):
    gates: Annotated[list[str], Meta(min_length=1)]
    reason_code: str = "waiting_for_signal"


class ParkedResponse(msgspec.Struct, frozen=True):
    suspension_id: str
    handle: str


class GatesReadyResponse(msgspec.Struct, frozen=True):
    variant: ClassVar[str] = "Ready"
    gates: list[str]


class ReadWaitsResponse(msgspec.Struct, frozen=True):
    """Open gates and the memos of closed ones, by name."""

    open: dict[str, Gate]
    memos: dict[str, GateMemo]


class ReadVotesResponse(msgspec.Struct, frozen=True):
    signals: list[ObservedSignalItem]
