"""The agreement machine on waiting work: all stores wait alike, and what may never happen does not."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.stateful.table import live
from tests.stateful.test_agreement import Agreement
from tests.stateful.waiting import Waiting


class WaitingAgreement(Waiting, Agreement):
    """Several stores at once."""


@pytest.fixture
def table(own_database: str) -> type[WaitingAgreement]:
    """The machine, with the database of this process."""
    return type("WaitingHere", (WaitingAgreement,), {"database": own_database})


@pytest.mark.timeout(600)
def test_every_store_waits_alike(table: type[WaitingAgreement]) -> None:
    run_state_machine_as_test(
        table,
        settings=settings(
            max_examples=10,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            phases=(Phase.reuse, Phase.generate, Phase.shrink),
        ),
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_long_life_of_waiting_is_the_same_on_every_store(table: type[WaitingAgreement], seed: int) -> None:
    live(table, seed, steps=150)


# A life of 250 steps takes some five seconds. Ten of them are a piece of a minute, so that a run can be split, spread
# over processes and stopped without losing what it has found out.
@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", range(2000, 2240, 10))
def test_many_long_lives_of_waiting_are_the_same_on_every_store(table: type[WaitingAgreement], first: int) -> None:
    for seed in range(first, first + 10):
        live(table, seed, steps=250)
