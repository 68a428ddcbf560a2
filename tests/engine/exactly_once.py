"""Run an operation on a store that loses the first write or its reply, and check that it takes effect once."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric.clock import ManualClock
from flowfabric.model.limits.budget import UsageKey
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.port import Store
from tests.engine.lossy_store import Loss, LossyStore
from tests.engine.runtime import test_lost_replies as lost
from tests.engine.runtime.test_lost_replies import Case, create_scene, plain
from tests.scenarios.checked_store import dump


async def assert_exactly_once(store: Store, clock: ManualClock, case: Case, loss: Loss) -> None:
    """Compare the answer and all rows with a run in which nothing is lost."""
    lossy = LossyStore(store)
    act = await case(await create_scene(lossy, clock))
    lossy.next_loss = loss

    answer = await act()

    calm_clock = ManualClock()
    calm = MemoryStore(calm_clock)
    undisturbed = await case(await create_scene(calm, calm_clock))
    assert lossy.losses == 1, "nothing was lost: the case does not write"
    assert plain(answer) == plain(await undisturbed())
    assert _plain_rows(await dump(store)) == _plain_rows(await dump(calm))


def _plain_rows(rows: dict[str, list[Any]]) -> dict[str, Any]:
    """Return all rows without what differs from run to run: change keys contain minted ids."""
    kept = {
        name: [_unminted(one) for one in found if not isinstance(one, UsageKey) or "change:" not in one.digest]
        for name, found in rows.items()
    }
    return lost.plain_rows(kept)


def _unminted(row: Any) -> Any:
    return msgspec.structs.replace(row, admission=0) if hasattr(row, "admission") else row
