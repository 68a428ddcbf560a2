"""The spec of a schedule: checked when it is defined, parsed once, and asked for the instant after another.

* `cron` has five fields (or `@daily` and the like) and is read as Debian's cron reads it. A job at fixed times whose
  time does not exist on a day of the change to summer time runs once, right after the gap; one whose time exists twice
  runs the first time. A job whose minute or hour begins with a star runs at every real minute or hour.
* `every` counts absolute time from the epoch, so zones and restarts do not move it.
* A calendar is wall-clock time like a cron job at a fixed time.
"""

from __future__ import annotations

import calendar as months
import copy
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim, CronSimError

from flowfabric import errors
from flowfabric.model.scheduling.schedule import Calendar, ScheduleSpec
from flowfabric.rules import validation

MIN_EVERY_MS = 1000
MIN_CATCH_UP_MS = 10_000
MAX_TEXT_BYTES = 256
FIRST_INSTANT_MS = 0
_HORIZON_MONTHS = 12 * 50  # a calendar without a day within fifty years never fires

ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_WEEKDAY_PART = re.compile(rf"({'|'.join(WEEKDAYS)})(?:-({'|'.join(WEEKDAYS)}))?").fullmatch

Next = Callable[[int], int | None]


class ParsedSpec(msgspec.Struct, frozen=True):
    """A spec that was checked. `next_after` returns the first instant after another, None if there is none."""

    spec: ScheduleSpec
    next_after: Next


@lru_cache(maxsize=4096)
def parse(text: str) -> ParsedSpec:
    """Parse a stored spec."""
    return parse_spec(msgspec.json.decode(text, type=ScheduleSpec))


def parse_spec(spec: ScheduleSpec) -> ParsedSpec:
    """Check a spec and parse it; raise `InvalidInput`, which names the fix."""
    given = [name for name in ("cron", "every_ms", "calendar") if getattr(spec, name) is not None]
    if len(given) != 1:
        has = " and ".join(name.removesuffix("_ms") for name in given) or "none of them"
        raise errors.InvalidInput(f'schedule: give one of cron=, every= and at=, as in cron="0 3 * * *"; it has {has}')
    if validation.duration_ms("catch_up", spec.catch_up_ms, least=0) < MIN_CATCH_UP_MS:
        raise errors.InvalidInput(
            'catch_up: shorter than 10 s; an instant is fired a moment after it has come, so write "10s" or more'
        )
    validation.duration_ms("jitter", spec.jitter_ms, least=0)
    if spec.every_ms is None and spec.offset_ms:
        raise errors.InvalidInput("offset: goes with every=; a cron or calendar names its times itself")
    zone = _zone(spec.tz)
    if spec.every_ms is not None:
        following = _interval(spec.every_ms, spec.offset_ms)
    elif spec.cron is not None:
        following = _cron(spec.cron, zone)
    else:
        assert spec.calendar is not None
        following = _calendar(spec.calendar, zone)
    return ParsedSpec(spec, following)


def _zone(name: object) -> tzinfo:
    text = validation.text("tz", name, limit=MAX_TEXT_BYTES)
    if text == "UTC":
        return UTC
    try:
        return ZoneInfo(text)
    except (KeyError, ValueError, OSError):  # unknown, not the form of a name, a folder of zones
        raise errors.InvalidInput(
            f"tz: {validation.preview(text)} is no time zone that is known here; write one like Europe/Berlin, or UTC"
        ) from None


def _interval(every_ms: int, offset_ms: int) -> Next:
    validation.duration_ms("every", every_ms, least=MIN_EVERY_MS)
    validation.integer("offset", offset_ms, least=0, most=every_ms - 1)
    return lambda after: after + every_ms - (after - offset_ms) % every_ms


def _cron(text: object, zone: tzinfo) -> Next:
    expression = validation.text("cron", text, limit=MAX_TEXT_BYTES)
    fields = ALIASES.get(expression.strip().lower(), expression)
    if len(fields.split()) != 5:
        raise errors.InvalidInput(
            f"cron: {validation.preview(expression)} has {len(fields.split())} fields; it needs five (minute, hour, "
            f'day, month, weekday), as in "0 3 * * *", or one of {", ".join(ALIASES)}'
        )
    try:
        parsed = CronSim(fields, datetime(2000, 1, 1, tzinfo=zone))
    except CronSimError as wrong:
        raise errors.InvalidInput(
            f"cron: {validation.preview(expression)} cannot be read: {str(wrong).lower()}; "
            'write it like "30 2 * * mon-fri"'
        ) from None

    fixed = parsed.fixup_tz is not None

    def following(after: int) -> int | None:
        try:
            return (_next_fixed if fixed else _next_real)(parsed, zone, after)
        except (StopIteration, RuntimeError, OverflowError):  # no day matches, or the calendar ends
            return None

    if following(FIRST_INSTANT_MS) is None:
        raise errors.InvalidInput(f"cron: {validation.preview(expression)} names no day that exists")
    return following


def _next_fixed(parsed: CronSim, zone: tzinfo, after: int) -> int:
    """Return the next instant of a job at fixed times."""
    cron = copy.copy(parsed)
    cron.dt = datetime.fromtimestamp(after // 1000, zone).replace(tzinfo=None)
    while (found := _epoch_ms(next(cron))) <= after:
        pass  # a time in the gap and one right after it are the same instant, and a clock set back repeats times
    return found


def _next_real(parsed: CronSim, zone: tzinfo, after: int) -> int:
    """Return the next real minute that matches.

    cronsim counts hours through a change of summer time as if it were by a whole hour, which is not so on Lord Howe. So
    it counts up to the next change with the offset of before, and from there on with the new one.
    """
    begin = datetime.fromtimestamp(after // 1000, UTC)
    offset = _offset(zone, begin)
    while True:
        cron = copy.copy(parsed)
        cron.dt = (begin + offset).replace(tzinfo=None)
        found = next(cron).replace(tzinfo=UTC) - offset
        changed = _first_change(zone, begin, found)
        if changed is None:
            return _epoch_ms(found)
        begin, offset = changed - timedelta(seconds=1), _offset(zone, changed)


def _offset(zone: tzinfo, instant: datetime) -> timedelta:
    return instant.astimezone(zone).utcoffset() or timedelta()


def _first_change(zone: tzinfo, begin: datetime, end: datetime) -> datetime | None:
    """Return the first instant after `begin` and up to `end` with another offset from UTC."""
    if zone is UTC:
        return None
    first, last = begin + timedelta(seconds=1), begin
    offset = _offset(zone, first)
    while last < end:
        last = min(last + timedelta(days=1), end)
        if _offset(zone, last) != offset:
            while last - first > timedelta(seconds=1):
                middle = first + (last - first) // 2
                middle = middle.replace(microsecond=0)
                first, last = (middle, last) if _offset(zone, middle) == offset else (first, middle)
            return last
        first = last
    return None


def _calendar(given: Calendar, zone: tzinfo) -> Next:
    if not isinstance(given, Calendar):
        raise errors.InvalidInput("at: not a Calendar; write at=Calendar(day=1, hour=18)")
    hour = validation.integer("at: hour", given.hour, least=0, most=23)
    minute = validation.integer("at: minute", given.minute, least=0, most=59)
    month = None if given.month is None else validation.integer("at: month", given.month, least=1, most=12)
    weekdays = _weekdays(given.weekdays)
    day = given.day
    if isinstance(day, str) and day not in ("first", "last"):
        raise errors.InvalidInput(f'at: day: {validation.preview(day)} is not 1 to 31, "first" or "last"')
    if not isinstance(day, str) and day is not None:
        validation.integer("at: day", day, least=1, most=31)

    def following(after: int) -> int | None:
        begin = datetime.fromtimestamp(after // 1000, zone).date()
        year, number = begin.year, begin.month
        for _ in range(_HORIZON_MONTHS):
            if (month is None or number == month) and year < 9999:
                for one in _days_of(year, number, day, weekdays):
                    # A time in the gap may fall on the day after.
                    if one >= begin - timedelta(days=1) and (found := _wall_ms(one, hour, minute, zone)) > after:
                        return found
            year, number = (year, number + 1) if number < 12 else (year + 1, 1)
        return None

    if following(FIRST_INSTANT_MS) is None:
        raise errors.InvalidInput("at: names no day that exists; correct day= or month=")
    return following


def _weekdays(text: str | None) -> frozenset[int]:
    if text is None:
        return frozenset(range(7))
    found: set[int] = set()
    for part in validation.text("at: weekdays", text, limit=MAX_TEXT_BYTES).lower().replace(" ", "").split(","):
        match = _WEEKDAY_PART(part)
        if match is None:
            raise errors.InvalidInput(f'at: weekdays: {validation.preview(text)} cannot be read; write "mon-fri,sun"')
        first, last = WEEKDAYS.index(match[1]), WEEKDAYS.index(match[2] or match[1])
        found |= {(first + step) % 7 for step in range((last - first) % 7 + 1)}
    return frozenset(found)


def _days_of(year: int, month: int, day: int | str | None, weekdays: frozenset[int]) -> list[date]:
    """Return the days of a month that a calendar names, ascending."""
    every = (date(year, month, number) for number in range(1, months.monthrange(year, month)[1] + 1))
    found = [one for one in every if one.weekday() in weekdays and (isinstance(day, str) or day in (None, one.day))]
    if day == "first":
        return found[:1]
    return found[-1:] if day == "last" else found


def _wall_ms(day: date, hour: int, minute: int, zone: tzinfo) -> int:
    """Return the instant of a time of day: the first of two, or the end of the gap that it falls into."""
    wall = datetime(day.year, day.month, day.day, hour, minute, tzinfo=zone)
    while not _exists(wall):
        wall += timedelta(minutes=1)
    return _epoch_ms(wall)


def _exists(wall: datetime) -> bool:
    back = wall.astimezone(UTC).astimezone(wall.tzinfo)
    return (back.hour, back.minute) == (wall.hour, wall.minute)


def _epoch_ms(instant: datetime) -> int:
    return int(instant.timestamp()) * 1000
