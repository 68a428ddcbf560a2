"""Rows of bulk operations: one command to every execution that a filter finds, executed by the sweeps in pages."""

from __future__ import annotations

from enum import StrEnum
from typing import Generic

import msgspec

from flowfabric.model.instant import Instant


class BulkVerb(StrEnum):
    """What is done to each execution."""

    CANCEL = "cancel"
    REPLAY = "replay"
    PRIORITY = "priority"


class BulkState(StrEnum):
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"


class BulkOperation(msgspec.Struct, Generic[Instant], frozen=True):
    """A bulk operation and its progress.

    The executions of the current page are pinned in `page` with their lives before anything is done to them. So a page
    that a dead process left behind is executed again without touching an execution twice: a life that is over is
    left alone.
    """

    operation_id: str
    verb: BulkVerb
    criteria: str  # the `ExecutionFilter` as JSON
    ceiling: int  # the largest number of executions to act on
    state: BulkState
    created_at: Instant
    reason: str
    requested_by: str
    priority: int | None = None  # the verb `priority` sets it
    due_at: Instant | None = None  # now while it runs, then the instant at which the row is deleted
    after_created_at: int | None = None  # the position up to which executions were searched
    after_execution_id: str | None = None
    page: str | None = None  # pinned executions as JSON: [[id, life], …]
    changed: int = 0
    refused: int = 0
    last_refusal: str | None = None
    ended_at: Instant | None = None
    revision: int = 0


class PinnedExecution(msgspec.Struct, frozen=True, array_like=True):
    """An execution of the current page; `life` is its replay count when it was found."""

    execution_id: str
    life: int
