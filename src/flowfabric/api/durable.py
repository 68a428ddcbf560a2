"""Schemas of durable functions: recorded steps, gates, parking, what is remembered and what was left."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from flowfabric.api.encoding import HolderRequest, Natural, Octets, RedactedRepr, RequestBody
from flowfabric.api.executions import MAX_BULK, CreateExecutionRequest
from flowfabric.api.signals import ObservedSignalItem
from flowfabric.model.gate import Fact, Gate, GateKind, GateMemo, StepMemo, StepState


class RecordStepRequest(HolderRequest, frozen=True):
    name: str
    occurrence: Natural
    result: Octets | None = None
    result_b64: bytes | None = None
    encoding: str | None = None
    digest: str | None = None
    state: StepState = StepState.DONE
    number: Natural | None = None
    started_at: Natural | None = None
    octets_field: ClassVar = "result"


class ContinueAsNewRequest(HolderRequest, frozen=True):
    """The input of the next life, and the gates whose outcome the function has not seen."""

    input_payload_b64: bytes = b""
    encoding: str | None = None
    unmet: tuple[str, ...] = ()


class BatchInput(msgspec.Struct, frozen=True):
    """An input of a batch, by the id of the message that added it."""

    seq: int
    message_id: str
    payload: bytes | None
    payload_encoding: str | None = None


class ReadBatchResponse(msgspec.Struct, frozen=True):
    inputs: list[BatchInput]


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
    mailboxes: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    need: Natural = 0
    any_outcome: bool = False
    number: Natural | None = None
    task: str | None = None
    version: str | None = None
    note: str | None = None


class NewGate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A gate without links: of kind `mailbox`, `children` or `timer`, with the fields of that kind."""

    name: str
    kind: GateKind
    expires_in_ms: Natural | None = None
    expires_at: Natural | None = None
    mailbox: str | None = None
    mailboxes: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    need: Natural = 0
    any_outcome: bool = False
    number: Natural | None = None
    task: str | None = None
    version: str | None = None
    note: str | None = None


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


class OpenAndParkRequest(HolderRequest, frozen=True):
    """Gates to open, and gates that are open already, to wait for."""

    gates: tuple[NewGate, ...] = ()
    names: tuple[str, ...] = ()
    reason_code: str = "waiting_for_signal"


class OpenGatesRequest(HolderRequest, frozen=True):
    gates: Annotated[tuple[NewGate, ...], Meta(min_length=1)]


class GatesClosedResponse(msgspec.Struct, frozen=True):
    """The memos of the gates that have closed, by name; the lease is kept."""

    variant: ClassVar[str] = "Closed"
    memos: dict[str, GateMemo]


class LeftOperationItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operation that the function left: the gate of a wait, or with `is_gate` false a step."""

    name: str
    occurrence: Natural = 0
    is_gate: bool = True
    number: Natural | None = None


class MemoItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that is recorded once."""

    name: str
    occurrence: Natural = 0
    result_b64: bytes = b"null"
    encoding: str | None = None
    digest: str | None = None
    number: Natural | None = None
    started_at: Natural | None = None


class SpawnedChild(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A child to create, and the memo that records it; the result of the memo is the child's id."""

    execution: CreateExecutionRequest
    memo: MemoItem


class SpawnRequest(HolderRequest, frozen=True):
    children: Annotated[list[SpawnedChild], Meta(max_length=MAX_BULK)]


class SpawnResponse(msgspec.Struct, frozen=True):
    """One result per child, in order: Created or Duplicate."""

    results: list[dict[str, Any]]


class LeaveGatesRequest(HolderRequest, frozen=True):
    operations: list[LeftOperationItem]
    memo: MemoItem | None = None


class LeaveGatesResponse(msgspec.Struct, frozen=True):
    """The memo that is stored, if one was given."""

    memo: StepMemo | None = None


class RememberedResponse(msgspec.Struct, frozen=True):
    """Step memos by name and occurrence, open gates, and the memos of closed ones."""

    steps: list[StepMemo]
    open: dict[str, Gate]
    memos: dict[str, GateMemo]
    progress_counts: dict[str, int] = {}


class RecordPatchRequest(HolderRequest, frozen=True):
    patch: str
    is_new: bool
    number: Natural | None = None


class ReleaseHeldRequest(RequestBody, frozen=True):
    accept: bool = False
    version: str | None = None
    sender: str = ""


class ReleaseHeldResponse(msgspec.Struct, frozen=True):
    released: bool


class ListHeldRequest(RequestBody, frozen=True):
    tasks: list[str]
    namespace: str = "default"
    limit: Annotated[int, Meta(ge=1, le=1000)] = 1000


class ListHeldResponse(msgspec.Struct, frozen=True):
    execution_ids: list[str]


class PinVersionRequest(HolderRequest, frozen=True):
    version: str
    number: Natural | None = None


class UnpinRequest(RequestBody, frozen=True):
    """Without a version, workers of any version continue the run."""

    version: str | None = None


class UnpinResponse(msgspec.Struct, frozen=True):
    unpinned: bool


class CountHeldResponse(msgspec.Struct, frozen=True):
    """Held runs by task."""

    held: dict[str, int]


class ReadWaitsResponse(msgspec.Struct, frozen=True):
    """Open gates and the memos of closed ones, by name."""

    open: dict[str, Gate]
    memos: dict[str, GateMemo]


class ReadVotesResponse(msgspec.Struct, frozen=True):
    signals: list[ObservedSignalItem]


class ReplyRequest(HolderRequest, frozen=True):
    """A reply to a message: with a `reason` the message is refused. The memo records it once."""

    message_id: str
    memo: MemoItem
    payload: Octets | None = None
    payload_b64: bytes | None = None
    payload_encoding: str | None = None
    reason: str | None = None
    octets_field: ClassVar = "payload"


class CloseInboxRequest(HolderRequest, frozen=True):
    memo: MemoItem


class CloseInboxResponse(msgspec.Struct, frozen=True):
    """False if a message is unread; then the inbox is open as before."""

    closed: bool


class SetFactRequest(HolderRequest, frozen=True):
    """A set of a fact: the place in the function that sets it, and how often it has been set there."""

    name: str
    place: str
    count: Annotated[int, Meta(ge=1)]
    value: Octets | None = None
    value_b64: bytes | None = None
    encoding: str | None = None
    number: Natural | None = None
    octets_field: ClassVar = "value"


class ListFactsResponse(msgspec.Struct, frozen=True):
    facts: list[Fact]
