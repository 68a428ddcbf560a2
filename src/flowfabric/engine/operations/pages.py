"""Answers of read operations: outcomes, and pages of lists with their cursors."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric.model.failure import StoredFailure
from flowfabric.model.states import TerminalOutcome
from flowfabric.rules.execution import views
from flowfabric.rules.flow.views import FlowListing, FlowStatus
from flowfabric.rules.suspension.waitpoints import WaitpointView


class ExecutionOutcome(msgspec.Struct, frozen=True):
    """The outcome of a finished execution."""

    execution_id: str
    outcome: TerminalOutcome
    result: bytes | None
    encoding: str | None
    reason: str | None
    namespace: str | None = None  # None if a server did not report it
    failure: StoredFailure | None = None  # the exception of its last attempt, if it failed with one


class FlowPage(msgspec.Struct, frozen=True):
    """Flows, and the cursor of the next page."""

    flows: list[FlowStatus]
    next_cursor: str | None = None


class FlowListPage(msgspec.Struct, frozen=True):
    """Flows, and the cursor of the next page; `incomplete` as in a list of executions."""

    flows: list[FlowListing]
    next_cursor: str | None = None
    incomplete: bool = False


class ExecutionPage(msgspec.Struct, frozen=True):
    """Execution ids, and the cursor of the next page."""

    executions: list[str]
    next_cursor: str | None = None


class ExecutionListPage(msgspec.Struct, frozen=True):
    """Executions, and the cursor of the next page.

    `incomplete` says that the page is not full because one call reads a limited number of rows: the next one continues.
    """

    executions: list[views.ExecutionListing]
    next_cursor: str | None = None
    incomplete: bool = False


class IdMatches(msgspec.Struct, frozen=True):
    """Execution ids with a given prefix, in order; `more` is True if there are others."""

    execution_ids: list[str]
    more: bool = False


class LanePage(msgspec.Struct, frozen=True):
    """Names of lanes, and the cursor of the next page."""

    lanes: list[str]
    next_cursor: str | None = None


class ExpiredLease(msgspec.Struct, frozen=True):
    """A lease that has expired and was not yet reclaimed."""

    execution_id: str
    lease_id: str
    lease_epoch: int
    worker_instance_id: str
    expires_at_ms: int
    attempt_index: int


class ExpiredLeasePage(msgspec.Struct, frozen=True):
    """Expired leases, and the expiry and execution id of the last one as the cursor of the next page."""

    entries: list[ExpiredLease]
    cursor: tuple[int, str] | None = None


class HistoryEntry(msgspec.Struct, frozen=True):
    """One entry of the lease history of an execution."""

    event: str
    ts: int
    fields: dict[str, Any]


class WaitpointPage(msgspec.Struct, frozen=True):
    """Open waitpoints, and the cursor of the next page."""

    entries: list[WaitpointView]
    next_cursor: str | None = None


class SuspendedEntry(msgspec.Struct, frozen=True):
    """A suspended execution in a list; `suspended_at_ms` is the instant of its timeout."""

    execution_id: str
    suspended_at_ms: int
    reason: str


class SuspendedPage(msgspec.Struct, frozen=True):
    """Suspended executions, and the cursor of the next page."""

    entries: list[SuspendedEntry]
    next_cursor: str | None = None
