"""Unique prefixes of ids, on a store and through a server."""

from __future__ import annotations

import pytest

from flowfabric import Engine
from tests.cli.terminal import Terminal

ONE = "{fp:86}:0197aaaa-0000-7000-8000-000000000001"
TWO = "{fp:86}:0197aaaa-1111-7000-8000-000000000002"


@pytest.fixture
def ff(ff_or_server: Terminal) -> Terminal:
    """A terminal on a store with two executions."""

    async def create(engine: Engine) -> None:
        for execution_id, kind in ((ONE, "send"), (TWO, "bill")):
            await engine.create_execution(execution_id=execution_id, lane_id="default", execution_kind=kind)

    ff_or_server.engine(create)
    return ff_or_server


@pytest.mark.parametrize("short", ["86:0197aaaa-0", "{fp:86}:0197aaaa-0", "0197aaaa-0000", "0197AAAA00"])
def test_every_command_accepts_a_unique_prefix(ff: Terminal, short: str) -> None:
    assert ff.document("show", short)["execution"]["execution_id"] == ONE
    assert ff.document("explain", short)["execution_id"] == ONE
    assert ff.document("tail", short, "--no-follow")["execution_id"] == ONE
    assert ff.stdout("signal", short, "go").startswith("✓ sent")
    assert ff.stdout("cancel", short) == f"✓ {ONE} is cancelled\n"
    assert ff.run("result", short).exit_code == 3
    assert ff.stdout("replay", short) == f"✓ {ONE} is waiting\n"


@pytest.mark.parametrize("command", [("show",), ("cancel",), ("result",), ("explain",)])
def test_an_ambiguous_prefix_lists_the_matches_and_changes_nothing(ff: Terminal, command: tuple[str]) -> None:
    output = ff.refuses(*command, "0197aaaa")

    assert "more than one begins with '0197aaaa'; give more of it:" in output
    assert output.splitlines()[1:] == [f"  {ONE}  send", f"  {TWO}  bill"]
    assert {one["public_state"] for one in ff.document("ls")["executions"]} == {"waiting"}


def test_a_long_list_of_matches_says_that_there_are_others(ff: Terminal) -> None:
    async def create(engine: Engine) -> None:
        for number in range(3, 12):
            execution_id = f"{{fp:86}}:0197aaaa-2222-7000-8000-0000000000{number:02}"
            await engine.create_execution(execution_id=execution_id, lane_id="default", execution_kind="bill")

    ff.engine(create)
    lines = ff.refuses("show", "0197aaaa").splitlines()

    assert (len(lines), lines[-1]) == (12, "  and others")


def test_a_prefix_without_a_match_is_reported(ff: Terminal) -> None:
    output = ff.refuses("cancel", "0197b")

    assert "execution_not_found: no id begins with '0197b'" in output
    assert "Hint: `ff ls` shows which executions there are" in output


def test_budgets_are_found_by_a_prefix_of_their_id(ff: Terminal) -> None:
    budgets = ["0b000000-0000-4000-8000-000000000001", "0b000000-1000-4000-8000-000000000001"]

    async def create(engine: Engine) -> None:
        for budget in budgets:
            await engine.create_budget(budget, dimensions=["tokens"], hard_limits=[9], soft_limits=[5])

    ff.engine(create)

    assert ff.document("budgets", "0b000000-1")["budgets"][0]["budget_id"] == budgets[1]
    assert ff.document("budgets", "0b0000000000")["budgets"][0]["budget_id"] == budgets[0]
    assert all(budget in ff.refuses("budgets", "0b") for budget in budgets)
    assert "no id begins with '0c'" in ff.refuses("budgets", "0c")
