"""The event loop of programs that are FlowFabric's own: uvloop where it is to be had, else the one of asyncio.

A worker that drains Postgres spends about a tenth less on a job there; on SQLite, and where little is to be done, both
loops are alike. Whoever brings a loop of their own keeps it.

While it runs, Python's collector of cycles looks less often. A batch makes thousands of objects that refer to no
cycle and are gone by themselves; looking through them, and through everything that was ever loaded, cost 3 µs a job.
"""

from __future__ import annotations

import gc
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

YOUNG = 20_000  # objects that are made before the collector looks at them


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`. Loops are loaded when they are needed: help and shell completion need none."""
    import asyncio

    try:
        import uvloop as provider
    except ImportError:  # on a platform that has none
        import asyncio as provider  # type: ignore[no-redef]

    with _seldom_collecting(), asyncio.Runner(loop_factory=provider.new_event_loop) as runner:
        return runner.run(main)


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Leave alone what is loaded by now, and look at what is new less often."""
    young, *old = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(max(young, YOUNG) if young else 0, *old)  # 0 says that somebody wants no collector at all
    try:
        yield
    finally:
        gc.set_threshold(young, *old)
        gc.unfreeze()
