"""The instants of schedules, through changes of summer time, against a naive implementation of the same rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.errors import InvalidInput
from flowfabric.model.scheduling.schedule import Calendar, ScheduleSpec
from flowfabric.rules.schedules.recurrence import parse_spec

ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Santiago")
MINUTE = timedelta(minutes=1)
# For each zone two weeks around both changes of 2026; Lord Howe changes by half an hour, Santiago at midnight.
SEASONS = {
    "Europe/Berlin": (datetime(2026, 3, 25, tzinfo=UTC), datetime(2026, 10, 21, tzinfo=UTC)),
    "America/New_York": (datetime(2026, 3, 4, tzinfo=UTC), datetime(2026, 10, 28, tzinfo=UTC)),
    "Australia/Lord_Howe": (datetime(2026, 10, 1, tzinfo=UTC), datetime(2026, 4, 1, tzinfo=UTC)),
    "America/Santiago": (datetime(2026, 9, 2, tzinfo=UTC), datetime(2026, 4, 1, tzinfo=UTC)),
}
DAYS = 8


def epoch_ms(instant: datetime) -> int:
    return int(instant.timestamp() * 1000)


def instants_between(spec: ScheduleSpec, begin: datetime, end: datetime) -> list[datetime]:
    """Return the instants of a spec within some time."""
    parsed, found = parse_spec(spec), []
    at = parsed.next_after(epoch_ms(begin) - 1)
    while at is not None and at < epoch_ms(end):
        found.append(datetime.fromtimestamp(at / 1000, UTC))
        at = parsed.next_after(at)
    return found


def walls(zone: ZoneInfo, begin: datetime, end: datetime) -> Iterator[tuple[datetime, datetime, datetime]]:
    """Yield every real minute, with the time on the wall then and a minute before."""
    at = begin
    while at < end:
        yield at, at.astimezone(zone), (at - MINUTE).astimezone(zone)
        at += MINUTE


def naive(
    zone: ZoneInfo, begin: datetime, end: datetime, matches: Callable[[datetime], bool], *, fixed: bool
) -> list[datetime]:
    """Compute the instants minute by minute.

    A job at fixed times runs once for each time on the wall: the first time that it is shown, or right after the hand
    has jumped over it. Any other job runs at each real minute that matches.
    """
    found, shown = [], set()
    for at, wall, before in walls(zone, begin, end):
        if not fixed:
            if matches(wall):
                found.append(at)
            continue
        hand = wall.replace(tzinfo=None, fold=0)
        passed = [hand]
        skipped = before.replace(tzinfo=None, fold=0) + MINUTE
        while skipped < hand:
            passed.append(skipped)
            skipped += MINUTE
        if any(matches(time) and time not in shown for time in passed):
            found.append(at)
        shown.update(passed)
    return found


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize(
    ("cron", "fixed", "matches"),
    [
        ("30 2 * * *", True, lambda t: (t.hour, t.minute) == (2, 30)),
        ("15,30 2 * * *", True, lambda t: t.hour == 2 and t.minute in (15, 30)),
        ("0 0 * * *", True, lambda t: (t.hour, t.minute) == (0, 0)),
        ("30 0-3 * * *", True, lambda t: t.hour <= 3 and t.minute == 30),
        ("45 23 * * *", True, lambda t: (t.hour, t.minute) == (23, 45)),
        ("0 1 * * sun", True, lambda t: (t.hour, t.minute, t.weekday()) == (1, 0, 6)),
        ("*/30 * * * *", False, lambda t: t.minute in (0, 30)),
        ("0 * * * *", False, lambda t: t.minute == 0),
        ("*/7 2 * * *", False, lambda t: t.hour == 2 and t.minute % 7 == 0),
        ("10 */6 * * *", False, lambda t: t.hour % 6 == 0 and t.minute == 10),
    ],
)
@pytest.mark.parametrize("season", [0, 1], ids=["spring", "autumn"])
def test_spring_and_autumn_in_four_zones(
    zone: str, cron: str, fixed: bool, matches: Callable[[datetime], bool], season: int
) -> None:
    begin = SEASONS[zone][season]
    end = begin + timedelta(days=DAYS)
    # The naive implementation needs to have seen the hours before it begins.
    expected = [at for at in naive(ZoneInfo(zone), begin - timedelta(days=1), end, matches, fixed=fixed) if at >= begin]
    assert instants_between(ScheduleSpec(cron=cron, tz=zone), begin, end) == expected


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("season", [0, 1], ids=["spring", "autumn"])
def test_a_calendar_fires_like_a_cron_job_at_the_same_time(zone: str, season: int) -> None:
    begin = SEASONS[zone][season]
    end = begin + timedelta(days=DAYS)
    for hour, minute in ((0, 0), (1, 30), (2, 0), (2, 15), (2, 30), (3, 0), (23, 59)):
        calendar = instants_between(ScheduleSpec(calendar=Calendar(hour=hour, minute=minute), tz=zone), begin, end)
        assert calendar == instants_between(ScheduleSpec(cron=f"{minute} {hour} * * *", tz=zone), begin, end)


def test_days_of_the_month_count_among_the_weekdays() -> None:
    begin, end = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 7, 1, tzinfo=UTC)
    last = instants_between(ScheduleSpec(calendar=Calendar(day="last", hour=18, weekdays="mon-fri")), begin, end)
    first = instants_between(ScheduleSpec(calendar=Calendar(day="first", weekdays="sat-sun")), begin, end)
    assert [day.date().isoformat() for day in last] == [
        *("2026-01-30", "2026-02-27", "2026-03-31", "2026-04-30", "2026-05-29", "2026-06-30"),
    ]
    assert [day.day for day in first] == [3, 1, 1, 4, 2, 6]
    leap = instants_between(ScheduleSpec(calendar=Calendar(day=29, month=2)), begin, datetime(2033, 1, 1, tzinfo=UTC))
    assert [day.year for day in leap] == [2028, 2032]


@given(st.integers(1000, 10**9), st.integers(0, 10**9), st.integers(0, 4 * 10**12), st.sampled_from(ZONES))
def test_an_interval_counts_from_the_epoch_in_every_zone(every: int, offset: int, after: int, zone: str) -> None:
    spec = ScheduleSpec(every_ms=every, offset_ms=offset % every, tz=zone)
    following = parse_spec(spec).next_after(after)
    assert following is not None
    assert after < following <= after + every
    assert (following - offset % every) % every == 0


@given(
    st.sampled_from(("* * * * *", "30 2 * * *", "0 */5 * * *", "15 3 1 * *", "0 12 * * mon-fri", "@hourly", "@weekly")),
    st.sampled_from(ZONES),
    st.integers(0, 4 * 10**12),
)
def test_the_next_instant_is_later_and_the_same_from_everywhere_before_it(cron: str, zone: str, after: int) -> None:
    parsed = parse_spec(ScheduleSpec(cron=cron, tz=zone))
    following = parsed.next_after(after)
    assert following is not None
    assert following > after
    assert parsed.next_after((after + following) // 2) == following
    assert parsed.next_after(following - 1) == following


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        (ScheduleSpec(), "give one of"),
        (ScheduleSpec(cron="* * * *"), "needs five"),
        (ScheduleSpec(cron="* * * * * *"), "needs five"),
        (ScheduleSpec(cron="@fortnightly"), "needs five"),
        (ScheduleSpec(cron="60 * * * *"), "cannot be read"),
        (ScheduleSpec(cron="0 0 31 2 *"), "cron: "),
        (ScheduleSpec(cron="@daily", tz="Europe"), "no time zone"),
        (ScheduleSpec(cron="@daily", tz="../etc/passwd"), "no time zone"),
        (ScheduleSpec(cron="@daily", offset_ms=1), "offset: "),
        (ScheduleSpec(calendar=Calendar(day=32)), "at: day: "),
        (ScheduleSpec(calendar=Calendar(day="middle")), "at: day: "),
        (ScheduleSpec(calendar=Calendar(hour=24)), "at: hour: "),
        (ScheduleSpec(calendar=Calendar(day=30, month=2)), "no day that exists"),
        (ScheduleSpec(every_ms=999), "every: "),
    ],
)
def test_a_spec_that_cannot_be_used_is_refused_with_its_fix(spec: ScheduleSpec, wrong: str) -> None:
    with pytest.raises(InvalidInput, match=wrong):
        parse_spec(spec)
