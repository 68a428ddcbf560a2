"""The event loop of our own programs: it tunes the garbage collector while it runs and restores it afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from flowfabric import event_loop

Thresholds = tuple[int, int, int]


@pytest.fixture(autouse=True)
def threshold() -> Iterator[Thresholds]:
    found = gc.get_threshold()
    yield found
    gc.set_threshold(*found)


async def _settings() -> tuple[Thresholds, int]:
    return gc.get_threshold(), gc.get_freeze_count()


def test_the_collector_runs_less_often_and_skips_objects_loaded_before() -> None:
    before = gc.get_threshold()
    during, frozen = event_loop.run(_settings())
    assert during == (event_loop.GC_THRESHOLD, *before[1:])
    assert frozen > 0


@pytest.mark.parametrize("raises", [False, True])
def test_the_collector_is_restored_afterwards(raises: bool) -> None:
    async def main() -> None:
        if raises:
            raise ValueError("on purpose")

    before = gc.get_threshold()
    if raises:
        with pytest.raises(ValueError, match="on purpose"):
            event_loop.run(main())
    else:
        event_loop.run(main())
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("chosen", [0, 10 * event_loop.GC_THRESHOLD])
def test_a_user_setting_with_fewer_collections_is_kept(chosen: int) -> None:
    gc.set_threshold(chosen, 10, 10)
    during, _ = event_loop.run(_settings())
    assert during == (chosen, 10, 10)


def test_cycles_are_still_collected() -> None:
    class Knot:
        """An object that refers to itself."""

        alive = 0

        def __init__(self) -> None:
            self.itself = self
            Knot.alive += 1

        def __del__(self) -> None:
            Knot.alive -= 1

    async def main() -> int:
        most = 0
        for _ in range(5 * event_loop.GC_THRESHOLD):
            Knot()
            most = max(most, Knot.alive)
        return most

    assert event_loop.run(main()) <= 2 * event_loop.GC_THRESHOLD
