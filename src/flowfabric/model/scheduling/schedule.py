"""Rows of schedules: when runs of a task are created, and what has become of the instants so far.

A schedule lies on the partition of its task's lane, and so do its runs: the change that creates a run also moves the
schedule on to its next instant. Its id has the form of an execution's, so that the end of a run is reported to it in
the same way as that of a child to its parent.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Generic

import msgspec

from flowfabric.model.instant import Instant


class Overlap(StrEnum):
    """What happens at an instant while an earlier run of the schedule is under way."""

    SKIP = "skip"  # the instant is skipped
    QUEUE_ONE = "queue_one"  # one run waits for the end of the earlier one; further instants are skipped
    QUEUE = "queue"  # runs wait for each other, at most 100
    CANCEL = "cancel"  # the earlier run is cancelled in the change that creates the new one
    ALLOW = "allow"  # runs may overlap


class PausedBy(StrEnum):
    """Who paused a schedule."""

    PERSON = "person"
    DEPLOY = "deploy"  # it is no longer declared in the code
    FAILURE = "failure"  # a run failed, and the schedule asks to be paused then


class Calendar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Days of the calendar, and the time of day in the schedule's zone.

        Calendar(day="last", hour=18, weekdays="mon-fri")  # the last working day of each month, at 18:00
        Calendar(day=1, month=4)                           # the first of April, at midnight

    `day` is a day of the month from 1 to 31, or "first" or "last": of the days that fall on one of `weekdays`. Without
    it, every day counts. `weekdays` is a list of days and ranges, as in "mon-wed,sat".
    """

    day: int | str | None = None
    month: int | None = None
    hour: int = 0
    minute: int = 0
    weekdays: str | None = None

    @property
    def text(self) -> str:
        """The calendar in words."""
        day = (
            "every day"
            if self.day is None
            else f"the {self.day} day"
            if isinstance(self.day, str)
            else f"day {self.day}"
        )
        month = "" if self.month is None else f" of month {self.month}"
        weekdays = "" if self.weekdays is None else f" of {self.weekdays}"
        return f"{day}{month}{weekdays} at {self.hour:02}:{self.minute:02}"


class ScheduleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """When a schedule fires (one of `cron`, `every_ms` and `calendar`), and what happens in special cases."""

    cron: str | None = None
    every_ms: int | None = None
    offset_ms: int = 0
    calendar: Calendar | None = None
    tz: str = "UTC"
    overlap: Overlap = Overlap.SKIP
    catch_up_ms: int = 10 * 60 * 1000
    jitter_ms: int = 0
    pause_on_failure: bool = False

    @property
    def text(self) -> str:
        """When it fires, in words."""
        if self.every_ms is not None:
            offset = f" from {self.offset_ms / 1000:g} s" if self.offset_ms else ""
            return f"every {self.every_ms / 1000:g} s{offset}"
        return f"{self.cron or (self.calendar and self.calendar.text)} {self.tz}"


class RunTemplate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What each run of a schedule has in common, except for its input."""

    lane_id: str
    execution_kind: str
    payload_encoding: str | None = None
    priority: int = 0
    creator_identity: str = ""
    policy: str | None = None
    tags: dict[str, str] = {}


class Schedule(msgspec.Struct, Generic[Instant], frozen=True):
    """A schedule. Its instants up to `decided_until` have been decided; `next_instant` is the first one after it."""

    schedule_id: str
    namespace: str
    name: str
    spec: str  # `ScheduleSpec` as JSON
    template: str  # `RunTemplate` as JSON
    digest: str  # by it, a start of a worker changes only what was changed in the code
    created_at: Instant
    updated_at: Instant
    decided_until: int
    input_payload: bytes | None = None
    owner: str | None = None  # the application that declares it in its code; None if it was created at run time
    next_at: Instant | int | None = None  # when it fires next, jitter included; None while it is paused
    next_instant: int | None = None
    paused_at: Instant | None = None
    paused_by: PausedBy | None = None
    note: str | None = None  # why it is paused
    active: str | None = None  # runs under way that others wait for, as JSON: {id: instant}
    pending: str | None = None  # instants whose runs wait for the end of another, as JSON
    last_run_id: str | None = None
    last_instant: int | None = None
    fired: int = 0
    skipped: int = 0
    missed: int = 0
    revision: int = 0
