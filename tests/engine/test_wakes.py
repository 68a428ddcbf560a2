"""Hints: a wait ends by a hint, by its time, or by being cancelled, whatever comes at the same moment."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric.engine.wakes import Wakes, waited


async def test_a_hint_ends_the_wait() -> None:
    wakes = Wakes()
    hint = wakes.expect("a", "b")
    wakes.fire(("b",))
    assert await waited(hint, 60)
    await asyncio.sleep(0)  # callbacks have their turn
    assert wakes.waiting("a") == 0


async def test_a_wait_ends_without_a_hint() -> None:
    wakes = Wakes()
    assert not await waited(wakes.expect("a"), 0)
    assert wakes.waiting("a") == 0


async def test_a_wait_that_is_cancelled_while_its_hint_comes_is_cancelled() -> None:
    wakes = Wakes()
    waiting = asyncio.create_task(waited(wakes.expect("a"), 60))
    await asyncio.sleep(0)
    wakes.fire(("a",))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
