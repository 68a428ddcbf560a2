"""The worker registry record by record: a decision holds while the worker is as live or expired as it was loaded."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from flowfabric.model.change import Delete, Guard, Upsert
from flowfabric.model.scheduling.worker import NotRegistered, RegisteredWorker, WorkerEvent
from flowfabric.rules.decision import Decision
from flowfabric.rules.scheduling import workers

NOW = 1_700_000_000_000
DAY_MS = 86_400_000
ASK = workers.Registration("n", "wa-1", "wa", frozenset({"default"}), frozenset({"gpu"}), 1000)
LIVE = RegisteredWorker("n", "wa-1", 3, "wa", '["old"]', "cpu", 500, NOW - 900, NOW - 400, NOW + 100, revision=4)
LAPSED = replace(LIVE, lapses_at=NOW)
LONG_GONE = replace(LIVE, lapses_at=NOW - 1)

STANDS: dict[str, tuple[Decision[Any], int | None, int | None, int | None]] = {
    "register anew": (workers.register(None, ASK, NOW), None, None, None),
    "register again": (workers.register(LIVE, ASK, NOW), 4, None, NOW + 99),
    "register after a lapse": (workers.register(LAPSED, ASK, NOW), 4, NOW, None),
    "beat": (workers.heartbeat(LIVE, "wa-1", NOW), 4, None, NOW + 99),
    "take out": (workers.mark_dead(LIVE, "wa-1", "gone", NOW), 4, None, NOW + 99),
    "sweep": (workers.remove_expired(LONG_GONE, NOW), 4, NOW - 1, None),
}


@pytest.mark.parametrize(("decision", "revision", "not_before", "not_after"), STANDS.values(), ids=STANDS.keys())
def test_a_worker_change_guards_the_record_and_its_time(
    decision: Decision[Any], revision: int | None, not_before: int | None, not_after: int | None
) -> None:
    change = decision.change

    assert change is not None
    assert change.guards == (Guard(RegisteredWorker, ("n", "wa-1"), revision),)
    assert (change.not_before, change.not_after) == (not_before, not_after)
    [event] = [write.row for write in change.writes if isinstance(write, Upsert) and isinstance(write.row, WorkerEvent)]
    assert (event.event_at_ms, event.expires_at) == (NOW, NOW + 7 * DAY_MS)


def test_an_expired_worker_registers_anew_and_a_live_one_continues() -> None:
    def entered(row: RegisteredWorker | None) -> RegisteredWorker:
        change = workers.register(row, ASK, NOW).change
        assert change is not None
        put = change.writes[0]
        assert isinstance(put, Upsert)
        assert isinstance(put.row, RegisteredWorker)
        return put.row

    assert [entered(row).registered_at_ms for row in (None, LIVE, LAPSED)] == [NOW, NOW - 900, NOW]
    for row in (None, LIVE, LAPSED):
        one = entered(row)
        assert (one.lanes, one.capabilities, one.liveness_ttl_ms) == ('["default"]', "gpu", 1000)
        assert (one.last_heartbeat_ms, one.lapses_at) == (NOW, NOW + 1000)


def test_a_heartbeat_changes_only_the_time() -> None:
    change = workers.heartbeat(LIVE, "wa-1", NOW).change

    assert change is not None
    assert change.writes[0] == Upsert(replace(LIVE, last_heartbeat_ms=NOW, lapses_at=NOW + 500))


@pytest.mark.parametrize("row", [None, LAPSED, LONG_GONE])
def test_an_unknown_worker_neither_beats_nor_is_marked_dead(row: RegisteredWorker | None) -> None:
    assert workers.heartbeat(row, "wa-1", NOW) == Decision(NotRegistered("wa-1"))
    assert workers.mark_dead(row, "wa-1", "gone", NOW) == Decision(NotRegistered("wa-1"))


@pytest.mark.parametrize("row", [None, LIVE, LAPSED])
def test_only_an_expired_record_is_swept(row: RegisteredWorker | None) -> None:
    assert workers.remove_expired(row, NOW) == Decision(False)
    swept = workers.remove_expired(LONG_GONE, NOW).change
    assert swept is not None
    assert swept.writes[0] == Delete(RegisteredWorker, ("n", "wa-1"))


@pytest.mark.parametrize(
    ("reason", "fits"),
    [("two words", True), ("~", True), ("\xa0", True), ("\x1f", False), ("\x7f", False), ("\x9f", False)],
)
def test_a_reason_has_no_control_characters(reason: str, fits: bool) -> None:
    assert (workers.check_reason(reason) is None) is fits
