"""Something is asked once on a store that loses the first write or its answer: it happens once, and is told so."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric.clock import ManualClock
from flowfabric.model.budget import UsageKey
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.port import Store
from tests.engine.losing import LosingStore, Loss
from tests.engine.runtime import test_lost_replies as lost
from tests.engine.runtime.test_lost_replies import Case, plain, scene_on
from tests.scenarios.checked_store import dump


async def happens_once(store: Store, clock: ManualClock, case: Case, loss: Loss) -> None:
    """Compare the answer and everything kept with what comes of it when nothing is lost."""
    losing = LosingStore(store)
    act = await case(await scene_on(losing, clock))
    losing.next_loss = loss

    answer = await act()

    calm_clock = ManualClock()
    calm = MemoryStore(calm_clock)
    undisturbed = await case(await scene_on(calm, calm_clock))
    assert losing.losses == 1, "nothing was lost: the case does not write"
    assert plain(answer) == plain(await undisturbed())
    assert _plain_rows(await dump(store)) == _plain_rows(await dump(calm))


def _plain_rows(rows: dict[str, list[Any]]) -> dict[str, Any]:
    """Everything kept, without what differs from try to try: traces of changes are named by minted ids."""
    kept = {
        name: [_unminted(one) for one in found if not isinstance(one, UsageKey) or "change:" not in one.digest]
        for name, found in rows.items()
    }
    return lost.plain_rows(kept)


def _unminted(row: Any) -> Any:
    return msgspec.structs.replace(row, admission=0) if hasattr(row, "admission") else row
