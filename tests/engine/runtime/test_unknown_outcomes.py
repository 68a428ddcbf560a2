"""A reply is lost, and then the store cannot be reached: the error says that the outcome is unknown."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.engine.runtime.backoff import StoreBackoff
from flowfabric.errors import StoreUnavailable
from flowfabric.stores.port import Store
from tests.engine.lossy_store import Loss, LossyStore

BUDGET = "0190c0de-0000-7000-8000-000000000001"
Operation = Callable[[Engine], Awaitable[object]]
OPERATIONS: dict[str, Operation] = {
    "one row": lambda engine: engine.create_execution(execution_id=engine.new_execution_id()),
    "an aggregate": lambda engine: engine.create_budget(
        BUDGET, dimensions=["tokens"], hard_limits=[5], soft_limits=[0]
    ),
}


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up at the first error that says nothing was written."""

    async def sleep_or_raise(backoff: StoreBackoff) -> None:
        error = sys.exception()
        if not isinstance(error, StoreUnavailable) or not error.in_doubt:
            raise

    monkeypatch.setattr(StoreBackoff, "sleep_or_raise", sleep_or_raise)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("loss", [Loss.DOUBT, Loss.ANSWER])
async def test_an_error_after_a_lost_reply_says_that_the_outcome_is_unknown(
    store: Store, name: str, loss: Loss
) -> None:
    lossy = LossyStore(store)
    engine = Engine(lossy)

    async def lose_loads() -> None:
        lossy.loads_to_lose = 1000

    lossy.next_loss, lossy.after_loss = loss, lose_loads
    with pytest.raises(StoreUnavailable) as caught:
        await OPERATIONS[name](engine)
    lossy.loads_to_lose = 0

    assert caught.value.in_doubt


async def test_an_error_before_anything_was_sent_says_that_nothing_was_written(store: Store) -> None:
    lossy = LossyStore(store)
    engine = Engine(lossy)
    lossy.loads_to_lose = 1000
    with pytest.raises(StoreUnavailable) as caught:
        await OPERATIONS["an aggregate"](engine)
    lossy.loads_to_lose = 0

    assert not caught.value.in_doubt
