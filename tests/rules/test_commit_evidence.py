"""Which rows and events prove that a change with a lost reply was written."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from flowfabric.model.change import Change, Insert, Patch, Upsert
from flowfabric.model.event import Event, FeedEvent
from flowfabric.model.execution import Execution
from flowfabric.model.instant import NOW
from flowfabric.model.suspension import IdempotencyRecord, Suspension, Waitpoint
from flowfabric.rules.commit_evidence import evidence_rows, find_event, is_evidence
from tests.stores.sample_rows import execution, loaded

PENDING: Waitpoint[Any] = Waitpoint("w", 3, "e", 1, "key", 1000, "kid", "print")
BOUND = replace(PENDING, suspension_id="s")
RECORD: IdempotencyRecord[Any] = IdempotencyRecord("e", "scope", "digest", NOW, "answer")
ROW = loaded(execution("e"))


def test_rows_with_minted_keys_prove_a_change_and_shared_rows_do_not() -> None:
    writes = (Insert(PENDING), Insert(RECORD), Upsert(Suspension("e", 3)), Patch(Execution, ("e",), {"priority": 1}))

    assert evidence_rows(Change((), writes=writes), []) == [PENDING, RECORD]


@pytest.mark.parametrize(("known", "proves"), [([], True), ([PENDING], True), ([BOUND], False)])
def test_a_waitpoint_proves_a_change_that_gives_it_to_a_suspension(known: list[Waitpoint[Any]], proves: bool) -> None:
    assert evidence_rows(Change((), writes=(Upsert(BOUND),)), known) == [BOUND] * proves


def test_a_waitpoint_is_recognised_after_others_have_changed_it() -> None:
    assert is_evidence(replace(BOUND, signal_count=4, closed_at=2000), BOUND)
    assert not is_evidence(PENDING, BOUND)
    assert not is_evidence(replace(BOUND, execution_id="other"), BOUND)


def test_instants_of_the_store_are_ignored() -> None:
    assert is_evidence(replace(RECORD, expires_at=5), RECORD)
    assert not is_evidence(replace(RECORD, digest="other"), RECORD)


def test_an_event_of_an_earlier_life_proves_nothing() -> None:
    event = Event("e", "default", outcome="success")
    history = [FeedEvent(1, 1000, event), FeedEvent(2, 3000, event), FeedEvent(3, 4000, Event("e", "default"))]

    assert find_event(history, event, None) == history[1]
    assert find_event(history, event, replace(ROW, last_mutation_at=3000)) == history[1]
    assert find_event(history, event, replace(ROW, last_mutation_at=3001)) is None
