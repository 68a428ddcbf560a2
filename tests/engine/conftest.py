"""What several pages of these tests have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from flowfabric.clock import ManualClock
from flowfabric.stores.port import Store
from tests.engine.crew import Crew


@pytest.fixture
async def crew(store: Store, clock: ManualClock) -> AsyncIterator[Crew]:
    crew = Crew(store)
    yield crew
    await crew.engine.dispatcher.close()


@pytest.fixture
def asked(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The trips of the store from now on: which, and with how much."""
    trips: list[tuple[str, int]] = []

    def counted(verb: str) -> Any:
        ask = getattr(crew.store, verb)

        async def told(given: Any, *more: Any) -> Any:
            trips.append((verb, len(given)))
            return await ask(given, *more)

        return told

    monkeypatch.setattr(crew.store, "try_load_now", lambda _: None)
    for verb in ("load", "commit"):
        monkeypatch.setattr(crew.store, verb, counted(verb))
    return trips
