"""A sentence about an obstacle is also given in parts, with its instants as numbers."""

from __future__ import annotations

import pytest

from flowfabric.model import obstacles
from flowfabric.model.obstacles import Explanation, Obstacle
from flowfabric.model.states import BlockingReason, PublicState, TerminalOutcome
from flowfabric.model.text import format_instant

AT = 1_795_212_105_381


@pytest.mark.parametrize(
    ("obstacle", "parts"),
    [
        (
            obstacles.DelayedObstacle(AT, BlockingReason.WAITING_FOR_RETRY_BACKOFF.value, "boom\nTraceback"),
            ["It failed and is tried again at ", AT, ": boom."],
        ),
        (obstacles.EndedObstacle(TerminalOutcome.SUCCESS, AT), ["It succeeded at ", AT, "."]),
        (obstacles.SuspendedObstacle("x", until=AT, waits_for=(obstacles.TIMER_WAIT,)), ["It sleeps until ", AT, "."]),
        (obstacles.Running("w", "w-1", AT, AT), ["It is running on w-1."]),
        (obstacles.Offered("w", AT), ["It is offered to w until ", AT, "."]),
    ],
)
def test_the_parts_of_a_sentence_are_texts_and_instants(obstacle: Obstacle, parts: list[str | int]) -> None:
    explanation = Explanation("{fp:1}:x", PublicState.WAITING, obstacle)

    assert explanation.parts == parts
    assert "".join(format_instant(part) if isinstance(part, int) else part for part in parts) == explanation.sentence
