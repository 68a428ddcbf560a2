"""The batcher: items that arrive while a flush is in flight form the next batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from flowfabric.batcher import Batcher, KeyedBatcher


class Recorder:
    """A flush that waits for `may_finish`, and records its batches."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.begun = asyncio.Event()
        self.may_finish = asyncio.Event()

    async def flush(self, items: list[str]) -> Sequence[str | Exception]:
        self.batches.append(items)
        self.begun.set()
        await self.may_finish.wait()
        return [item.upper() for item in items]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


async def test_an_idle_batcher_flushes_an_item_in_the_next_turn_of_the_loop(recorder: Recorder) -> None:
    batcher = Batcher(recorder.flush)

    result = batcher.add("a")
    await asyncio.sleep(0)

    assert recorder.batches == [["a"]]
    assert not result.done()


async def test_items_that_arrive_during_a_flush_form_one_batch_in_their_order(recorder: Recorder) -> None:
    batcher = Batcher(recorder.flush)
    first = batcher.add("a")
    await recorder.begun.wait()
    others = [batcher.add(item) for item in "bcd"]

    assert recorder.batches == [["a"]]
    recorder.may_finish.set()

    assert await first == "A"
    assert await asyncio.gather(*others) == ["B", "C", "D"]
    assert recorder.batches == [["a"], ["b", "c", "d"]]


async def test_an_item_that_arrives_when_the_last_flush_returns_is_flushed() -> None:
    batcher: Batcher[int, int]

    async def flush(items: list[int]) -> Sequence[int | Exception]:
        if items[0] < 100:
            late.append(batcher.add(items[0] + 1))
        return items

    late: list[asyncio.Future[int]] = []
    batcher = Batcher(flush)
    await batcher.add(0)
    await batcher.drain()

    assert [future.result() for future in late] == list(range(1, 101))
    assert batcher.is_idle


async def test_an_item_that_arrives_after_the_last_flush_starts_another(recorder: Recorder) -> None:
    recorder.may_finish.set()
    batcher = Batcher(recorder.flush)

    for item in "ab":
        assert await batcher.add(item) == item.upper()

    assert recorder.batches == [["a"], ["b"]]


async def test_a_flush_that_fails_fails_every_item_of_its_batch_and_no_other() -> None:
    async def flush(items: list[str]) -> Sequence[str | Exception]:
        if "bad" in items:
            raise ValueError("cannot flush")
        return items

    batcher = Batcher(flush, max_items=2)
    results = await asyncio.gather(*map(batcher.add, ["bad", "beside", "after"]), return_exceptions=True)

    assert [type(result) for result in results] == [ValueError, ValueError, str]


async def test_an_exception_among_the_results_fails_its_item_alone() -> None:
    async def flush(items: list[str]) -> Sequence[str | Exception]:
        return [KeyError(item) if item == "bad" else item for item in items]

    results = await asyncio.gather(*map(Batcher(flush).add, ["a", "bad", "b"]), return_exceptions=True)

    assert [type(result) for result in results] == [str, KeyError, str]


async def test_a_cancelled_caller_does_not_disturb_the_others_and_its_item_is_flushed(recorder: Recorder) -> None:
    abandoned: list[str] = []
    batcher = Batcher(recorder.flush, on_abandoned=abandoned.append)
    first = batcher.add("a")
    await recorder.begun.wait()
    waiting = [asyncio.ensure_future(batcher.add(item)) for item in "bc"]
    waiting[0].cancel()
    recorder.may_finish.set()

    assert (await first, await waiting[1]) == ("A", "C")
    assert recorder.batches == [["a"], ["b", "c"]]
    assert abandoned == ["b"]


async def test_a_flush_that_is_cancelled_cancels_its_callers(recorder: Recorder) -> None:
    batcher = Batcher(recorder.flush)
    result = batcher.add("a")
    await recorder.begun.wait()
    for task in batcher._tasks:
        task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await result
    await batcher.drain()
    assert batcher.is_idle


async def test_no_more_flushes_are_in_flight_than_allowed(recorder: Recorder) -> None:
    batcher = Batcher(recorder.flush, concurrency=2, max_items=1)
    results = [batcher.add(item) for item in "abc"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert recorder.batches == [["a"], ["b"]]
    recorder.may_finish.set()
    assert await asyncio.gather(*results) == ["A", "B", "C"]


async def test_items_with_an_equal_key_are_flushed_one_after_the_other(recorder: Recorder) -> None:
    batcher = Batcher(recorder.flush, keys=lambda item: [item[0]])
    recorder.may_finish.set()
    results = [batcher.add(item) for item in ("a1", "a2", "b1", "a3")]

    assert await asyncio.gather(*results) == ["A1", "A2", "B1", "A3"]
    assert recorder.batches == [["a1", "b1"], ["a2"], ["a3"]]


async def test_a_batch_is_bounded_by_weight_but_has_at_least_one_item(recorder: Recorder) -> None:
    batcher = Batcher(recorder.flush, max_weight=3, weight=len)
    recorder.may_finish.set()
    results = [batcher.add(item) for item in ("aaaaa", "b", "cc", "d")]
    await asyncio.gather(*results)

    assert recorder.batches == [["aaaaa"], ["b", "cc"], ["d"]]


async def test_items_of_different_keys_do_not_wait_for_each_other() -> None:
    begun: list[tuple[str, list[int]]] = []
    may_finish = asyncio.Event()

    async def flush(key: str, items: list[int]) -> Sequence[int | Exception]:
        begun.append((key, items))
        await may_finish.wait()
        return items

    batcher = KeyedBatcher(flush)
    results = [batcher.add("a", 1), batcher.add("b", 2)]
    await asyncio.sleep(0)
    results += [batcher.add("a", 3), batcher.add("a", 4)]

    assert begun == [("a", [1]), ("b", [2])]
    may_finish.set()
    assert await asyncio.gather(*results) == [1, 2, 3, 4]
    assert begun[2:] == [("a", [3, 4])]
    await batcher.drain()
    assert batcher._batchers == {}
