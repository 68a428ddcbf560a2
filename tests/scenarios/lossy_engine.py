"""An engine that loses a message to its store."""

from __future__ import annotations

from flowfabric.engine.engine import Engine
from flowfabric.stores.port import Store
from flowfabric.testing import FlakyStore, Loss


def lossy_engine(store: Store, loss: Loss, *, after: int = 0, times: int = 1) -> Engine:
    """Return an engine of its own on a store, of which this many commits, or the replies to them, are lost."""
    flaky = FlakyStore(store)
    flaky.lose("commit", loss, after=after, times=times)
    return Engine(flaky)
