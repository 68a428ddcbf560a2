"""Schemas of schedules."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from flowfabric.api.encoding import Natural, RequestBody
from flowfabric.api.executions import CreateExecutionRequest
from flowfabric.engine.types import PutOutcome
from flowfabric.model.scheduling.schedule import Overlap, ScheduleSpec


class PutScheduleRequest(RequestBody, frozen=True):
    """A schedule and the run that it creates again and again, which has no id, key, delay or deadline of its own."""

    spec: ScheduleSpec
    run: CreateExecutionRequest
    owner: str | None = None
    only_new: bool = False


class PutScheduleResponse(msgspec.Struct, frozen=True):
    outcome: PutOutcome


class PauseScheduleRequest(RequestBody, frozen=True):
    note: str = ""


class TriggerScheduleRequest(RequestBody, frozen=True):
    """The same `trigger_id` again creates no other run."""

    trigger_id: str | None = None
    uuid_fields: ClassVar = ("trigger_id",)


class BackfillScheduleRequest(RequestBody, frozen=True):
    """The instants from `start` to before `end`, in milliseconds since the epoch."""

    start: Natural
    end: Natural
    overlap: Overlap = Overlap.QUEUE


class RetireSchedulesRequest(RequestBody, frozen=True):
    """Pause or remove the schedules that an application no longer declares."""

    owner: str
    keep: list[str]
    note: str = ""
    remove: bool = False
    namespace: str | None = None


class ScheduleChangedResponse(msgspec.Struct, frozen=True):
    changed: bool


class RetiredSchedulesResponse(msgspec.Struct, frozen=True):
    retired: list[str]
