"""The durable function of the README behaves as the README says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flowfabric.testing.world import World

README = Path(__file__).parents[2] / "README.md"


async def test_two_people_approve_and_it_is_charged_once(page: Any) -> None:
    async with World(page.app) as world:
        run = await page.purchase.submit("3 apples")
        gate = await world.approval(run, "approve")
        await gate.answer_as("ana", page.Decision(True))
        await gate.answer_as("bo", page.Decision(True))
        assert await run.result() == "paid for 3 apples"
        await world.assert_invariants()


async def test_an_approval_of_the_readme_without_an_answer_is_denied(page: Any) -> None:
    async with World(page.app) as world:
        run = await page.purchase.submit("3 apples")
        await world.advance("3d")
        assert await run.result() == "rejected"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load the code block as a module."""
    marks = r"<!-- durable:begin -->\n```python\n(.*?)```\n<!-- durable:end -->"
    block = re.search(marks, README.read_text(), re.DOTALL)
    assert block is not None
    module = ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)
    exec(compile(block[1], str(README), "exec"), module.__dict__)
    return module
