"""The fair turns that a process remembers."""

from __future__ import annotations

import pytest

from flowfabric.engine.claiming import fair_turns
from flowfabric.engine.engine import Engine
from flowfabric.stores.memory.store import MemoryStore
from tests.stores.samples import loaded, waiting


async def test_a_process_that_unblocks_and_never_claims_remembers_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fair_turns, "MAX_UNBLOCKED", 10)
    engine = Engine(MemoryStore())
    for number in range(100):
        row = loaded(waiting(f"e{number}"))
        engine.keep_unblock_turns("lists of a limit", {row.lane_id: {"a": 1}}, [row])

        assert sum(map(len, engine._unblocked.values())) <= 10
