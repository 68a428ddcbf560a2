"""A row that others still need is checked again after they are purged, with a minimum delay."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.model.change import Patch
from flowfabric.model.execution import Execution
from flowfabric.model.instant import FromNow
from flowfabric.model.states import TerminalOutcome
from flowfabric.rules import retention
from tests.rules.execution.test_guards import EXECUTION, NOW, RUNNABLE, TERMINAL, row

A_MOMENT = retention.RECHECK_DELAY_MS
DAY_MS = 86_400_000


def ended(outcome: TerminalOutcome = TerminalOutcome.SUCCESS, **own: Any) -> Execution:
    return row(TERMINAL, terminal_outcome=outcome, completed_at=NOW - 10, **own)


def failed(purge_at: int) -> Execution:
    return ended(TerminalOutcome.FAILED, purge_at=purge_at)


OTHERS: dict[str, tuple[list[Execution], int]] = {
    "one that will go": ([failed(NOW + 50)], 50 + A_MOMENT),
    "the last of two": ([failed(NOW + 50), failed(NOW + 20)], 50 + A_MOMENT),
    "one that should have gone": ([failed(NOW - 5000)], A_MOMENT),
    "one that needs nothing": ([failed(NOW + 50), ended(purge_at=NOW + 70)], 50 + A_MOMENT),
    "one that has not ended": ([row(RUNNABLE), failed(NOW + 50)], DAY_MS),
}


@pytest.mark.parametrize(("others", "wait_ms"), OTHERS.values(), ids=OTHERS.keys())
def test_a_row_that_others_need_is_checked_again_shortly_after_they_are_purged(
    others: list[Execution], wait_ms: int
) -> None:
    decision = retention.purge(ended(purge_at=NOW - 3), NOW, others=others)

    assert decision.answer is False
    assert decision.change is not None
    assert decision.change.writes == (Patch(Execution, (EXECUTION,), {"purge_at": FromNow(wait_ms)}),)


def test_a_row_without_retention_is_not_checked_in_a_loop() -> None:
    kept = ended(purge_at=NOW - 3, terms='{"retention_ttl_ms":0}')

    decision = retention.purge(kept, NOW, others=[row(RUNNABLE)])

    assert decision.change is not None
    assert decision.change.writes == (Patch(Execution, (EXECUTION,), {"purge_at": FromNow(A_MOMENT)}),)
