"""What durable functions cost in CPU time of the process, compared with each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sdk.durable.cost import FAN_OUTS, LONG, SEQUENCES, measure


@pytest.mark.serial
async def test_branches_cost_no_more_than_a_gather_and_steps_cost_in_proportion_to_their_number(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'cost.db'}"
    found = await measure(url, 60, FAN_OUTS) | await measure(url, 5, SEQUENCES)
    assert found["100 branches"] <= 1.5 * found["gather of 100"], found
    few, many = LONG
    assert found[f"a function of {many} steps"] <= 1.3 * many / few * found[f"a function of {few} steps"], found
