"""The agreement test with suspensions: all stores behave alike, and invariants hold."""

from __future__ import annotations

import pytest

from tests.stateful.state_machine import live, run_drawn_sequences
from tests.stateful.suspensions import Waiting
from tests.stateful.test_agreement import Agreement


class WaitingAgreement(Waiting, Agreement):
    """Several stores at once."""


@pytest.fixture
def table(own_database: str) -> type[WaitingAgreement]:
    """The state machine, with the database of this process."""
    return type("WaitingHere", (WaitingAgreement,), {"database": own_database})


@pytest.mark.timeout(600)
def test_every_store_suspends_alike(table: type[WaitingAgreement]) -> None:
    run_drawn_sequences(table, examples=10, steps=40)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3))])
def test_a_long_sequence_of_suspensions_is_the_same_on_every_store(table: type[WaitingAgreement], seed: int) -> None:
    live(table, seed, steps=150)


# A sequence of 250 steps takes some five seconds. Ten of them take a minute, so that a run can be split, distributed
# over processes and stopped without losing its results.
@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", range(2000, 2240, 10))
def test_many_long_sequences_of_suspensions_are_the_same_on_every_store(
    table: type[WaitingAgreement], first: int
) -> None:
    for seed in range(first, first + 10):
        live(table, seed, steps=250)
