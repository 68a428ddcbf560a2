"""The fairness state that a process keeps in memory."""

from __future__ import annotations

import pytest

from flowfabric.engine.claiming import fair_turns
from flowfabric.engine.engine import Engine
from flowfabric.stores.memory.store import MemoryStore
from tests.stores.sample_rows import loaded, queued


async def test_a_process_that_unblocks_and_never_claims_keeps_a_bounded_number_of_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fair_turns, "MAX_UNBLOCKED", 10)
    engine = Engine(MemoryStore())
    for number in range(100):
        row = loaded(queued(f"e{number}"))
        engine.turns.keep_unblock_turns("lists of a limit", {row.lane_id: {"a": 1}}, [row])

        assert sum(map(len, engine.turns._unblocked.values())) <= 10
