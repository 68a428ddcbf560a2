"""SS-047 to SS-056 and EX-036: what an attempt puts out, in order, by its holder only, and how readers follow it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.operations.streams import Visibility
from flowfabric.engine.runtime.wakeups import stream_topic
from flowfabric.handles import Handle, HandleKind
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.stream import FrameMode
from flowfabric.rules.stream.append import BestEffort
from flowfabric.rules.stream.read import StreamPage, parse_cursor
from tests.scenarios.play import LEASE_MS, Play
from tests.scenarios.waits import Waits, until


def texts(page: StreamPage) -> list[str]:
    return [frame.fields["payload"] for frame in page.frames]


async def best_effort(play: Play, held: Claimed, payload: bytes = b"x", **given: int) -> int:
    mode = BestEffort(**given)
    appended = await play.engine.append_frame(held.handle, payload, mode=FrameMode.BEST_EFFORT, best_effort=mode)
    return appended.frame_count


@pytest.mark.spec("SS-047")
async def test_append_and_read(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id

    first = await play.engine.append_frame(held.handle, b"hello", frame_type="log")
    play.clock.advance_ms(3)
    second = await play.engine.append_frame(held.handle, b"done", frame_type="output", correlation_id="c")

    assert (first.frame_count, second.frame_count) == (1, 2)
    assert (first.stream_id, second.stream_id) == (f"{play.now - 3}-0", f"{play.now}-0")
    page = await play.engine.read_stream(e, 0, "start", "end", 100)
    common = {"encoding": "utf8", "source": "worker", "mode": "durable"}
    assert [frame.id for frame in page.frames] == [first.stream_id, second.stream_id]
    assert [frame.fields for frame in page.frames] == [
        {"frame_type": "log", "payload": "hello", "ts": str(play.now - 3), **common},
        {"frame_type": "output", "payload": "done", "ts": str(play.now), "correlation_id": "c", **common},
    ]
    assert (page.closed_at, page.closed_reason) == (None, None)


@pytest.mark.spec("SS-047")
async def test_bytes_that_are_no_text_come_as_base64(play: Play) -> None:
    held = await play.claimed()
    await play.engine.append_frame(held.handle, b"\xff\x00", kind="blob")

    [frame] = (await play.engine.read_stream(held.execution_id, 0)).frames

    assert (frame.fields["payload"], frame.fields["encoding"]) == ("/wA=", "base64")
    assert frame.fields["frame_type"] == "blob"


@pytest.mark.spec("SS-048")
async def test_stale_appenders(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    fields = held.handle.fields
    wrong: list[dict[str, Any]] = [
        {"lease_epoch": 2},
        {"attempt_index": 1},
        {"lease_id": "99999999-9999-4999-8999-999999999999"},
    ]
    for change in wrong:
        values = {name: getattr(fields, name) for name in fields.__struct_fields__} | change
        handle = Handle.mint(held.handle.backend, HandleKind.FRESH, type(fields)(**values))
        async with play.refused(errors.StaleOwnerCannotAppend):
            await play.engine.append_frame(handle, b"late")
    play.clock.advance_ms(LEASE_MS)
    async with play.refused(errors.StaleOwnerCannotAppend):
        await play.engine.append_frame(held.handle, b"late")
    assert (await play.vector(e)).startswith("active/leased/")
    revoked = await play.claimed()
    await play.revoked(revoked)
    async with play.refused(errors.StaleOwnerCannotAppend):
        await play.engine.append_frame(revoked.handle, b"late")


@pytest.mark.spec("SS-048")
async def test_streams_of_work_that_does_not_run_are_closed(play: Play, waits: Waits) -> None:
    endings: dict[str, Callable[[Claimed], Awaitable[object]]] = {
        "complete": lambda held: play.engine.complete(held.handle),
        "fail": lambda held: play.engine.fail(held.handle, reason="no", category="permanent"),
        "cancel": lambda held: play.engine.cancel(held.handle),
        "suspend": lambda held: waits.suspend(held),
    }
    for end in endings.values():
        held = await play.claimed()
        await end(held)
        async with play.refused(errors.StreamClosed):
            await play.engine.append_frame(held.handle, b"late")


@pytest.mark.spec("SS-049")
async def test_close_reasons(play: Play, waits: Waits) -> None:
    async def time_out(held: Claimed) -> None:
        play.clock.now = (await play.core(held.execution_id))["attempt_timeout_at"]
        await play.engine.sweep_once("attempt_timeout")

    async def suspended_too_long(held: Claimed) -> None:
        await waits.suspend(held, timeout_at=play.now + 5)
        await waits.time_out(play.now + 5)

    policy = {"timeout_policy": {"attempt_timeout_ms": 1000}}
    endings: dict[str, Callable[[Claimed], Awaitable[object]]] = {
        "attempt_success": lambda held: play.engine.complete(held.handle),
        "attempt_failure": lambda held: play.engine.fail(held.handle, reason="no"),
        "attempt_cancelled": lambda held: play.engine.cancel_execution(held.execution_id),
        "expired": time_out,
        "suspension_timeout": suspended_too_long,
    }
    for reason, end in endings.items():
        held = await play.claimed(policy=policy)
        await play.engine.append_frame(held.handle, b"frame")
        await end(held)
        for page in (
            await play.engine.read_stream(held.execution_id, 0),
            await play.engine.tail_stream(held.execution_id, 0),
        ):
            assert (page.closed_at, page.closed_reason, texts(page)) == (play.now, reason, ["frame"])
    silent = await play.claimed()
    await play.engine.complete(silent.handle)
    assert await play.engine.read_stream(silent.execution_id, 0) == StreamPage([])


@pytest.mark.spec("SS-049")
async def test_a_failure_that_is_retried_closes_what_its_attempt_put_out(play: Play) -> None:
    held = await play.claimed(policy={"retry_policy": {"max_retries": 1}})
    e, t = held.execution_id, play.now
    await play.engine.append_frame(held.handle, b"first")
    await play.engine.fail(held.handle, reason="flaky")
    await play.promoted(e)
    again = await play.claimed_again(e)
    await play.engine.append_frame(again.handle, b"second")

    first, second = await play.engine.read_stream(e, 0), await play.engine.read_stream(e, 1)

    assert (first.closed_at, first.closed_reason, texts(first)) == (t, "attempt_failure", ["first"])
    assert (second.closed_at, second.closed_reason, texts(second)) == (None, None, ["second"])


@pytest.mark.spec("SS-049")
async def test_a_reclaim_closes_what_the_lapse_did_not(play: Play) -> None:
    held, other = await play.claimed(), await play.claimed()
    for one in (held, other):
        await play.engine.append_frame(one.handle, b"frame")
    await play.revoked(held)
    await play.reclaimed(held.execution_id)
    assert (await play.engine.read_stream(held.execution_id, 0)).closed_reason == "reclaimed"
    await play.expired(other)
    later = await play.reclaimed(other.execution_id)
    assert (await play.engine.read_stream(other.execution_id, 0)).closed_reason == "lease_expired"

    await play.engine.append_frame(later.handle, b"anew")
    assert texts(await play.engine.read_stream(other.execution_id, 1)) == ["anew"]
    assert texts(await play.engine.read_stream(other.execution_id, 0)) == ["frame"]


@pytest.mark.spec("EX-036")
async def test_expiry_closes_the_output_stream_once(play: Play) -> None:
    silent, written = await play.claimed(), await play.claimed()
    await play.engine.append_frame(written.handle, b"frame")

    await play.expired(silent)
    await play.expired(written)

    page = await play.engine.read_stream(written.execution_id, 0)
    assert (page.closed_at, page.closed_reason) == (play.now, "lease_expired")
    assert await play.engine.read_stream_info(silent.execution_id, 0) is None
    play.clock.advance_ms(5)
    await play.engine.mark_lease_expired_if_due(written.execution_id)
    await play.engine.cancel_execution(written.execution_id)
    assert await play.engine.read_stream(written.execution_id, 0) == page


@pytest.mark.spec("SS-050")
@pytest.mark.parametrize(
    ("text", "cause"),
    [("", "empty"), ("-", "bare marker"), ("+", "bare marker")]
    + [(text, "malformed") for text in ("abc", "12-", "-5", "1-2-3", "１", " 1", "1 ", "9" * 21)],
)
def test_cursor_grammar_refuses(text: str, cause: str) -> None:
    with pytest.raises(errors.InvalidInput, match=cause):
        parse_cursor(text)


@pytest.mark.spec("SS-050")
async def test_cursor_grammar_accepts(play: Play) -> None:
    accepted = ["start", "end", "123", "123-4"]
    assert [parse_cursor(text) for text in accepted] == ["start", "end", (123, None), (123, 4)]
    for text in ("start", "end"):
        with pytest.raises(errors.InvalidInput):
            await play.engine.tail_stream(play.engine.new_execution_id(), 0, after=text)
    for count, detail in ((0, "count_limit must be >= 1"), (10_001, "count_limit_exceeds_hard_cap")):
        with pytest.raises(errors.InvalidInput) as refusal:
            await play.engine.read_stream(play.engine.new_execution_id(), 0, "start", "end", count)
        assert refusal.value.detail == detail


@pytest.mark.spec("SS-050")
async def test_both_ends_of_a_read_are_included(play: Play) -> None:
    held = await play.claimed()
    e, t = held.execution_id, play.now
    for text in (b"a", b"b"):
        await play.engine.append_frame(held.handle, text)
    play.clock.advance_ms(1)
    await play.engine.append_frame(held.handle, b"c")

    async def between(first: str, last: str, count: int = 100) -> list[str]:
        return texts(await play.engine.read_stream(e, 0, first, last, count))

    assert await between(f"{t}-1", "end") == ["b", "c"]
    assert await between("start", f"{t}-0") == ["a"]
    assert await between(f"{t}", f"{t}") == ["a", "b"]
    assert await between("start", "end", 2) == ["a", "b"]
    assert await between("end", "start") == []
    assert texts(await play.engine.tail_stream(e, 0, after=f"{t}")) == ["b", "c"]
    assert texts(await play.engine.tail_stream(e, 0, after=f"{t}-1")) == ["c"]


async def tailing(play: Play, e: str, **given: object) -> asyncio.Task[tuple[StreamPage, float]]:
    """A tail that has begun to wait."""

    async def timed() -> tuple[StreamPage, float]:
        begun = time.monotonic()
        page = await play.engine.tail_stream(e, 0, **given)  # type: ignore[arg-type]
        return page, time.monotonic() - begun

    waiting = play.engine.runtime.wakeups.subscriber_count(stream_topic(e))
    task = asyncio.create_task(timed())
    await until(lambda: play.engine.runtime.wakeups.subscriber_count(stream_topic(e)) > waiting)
    return task


@pytest.mark.spec("SS-051")
async def test_tail_blocks_and_wakes(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    tail = await tailing(play, e, after="0-0", block_ms=20_000)
    await play.engine.append_frame(held.handle, b"wake")

    page, length = await tail
    assert texts(page) == ["wake"]
    assert length < 10
    last = page.frames[-1].id
    begun = time.monotonic()
    assert await play.engine.tail_stream(e, 0, after=last, block_ms=200) == StreamPage([])
    assert 0.19 <= time.monotonic() - begun < 10
    assert await play.engine.tail_stream(e, 0, after=last, block_ms=0) == StreamPage([])


@pytest.mark.spec("SS-052")
async def test_tail_wakes_on_close(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    first = await play.engine.append_frame(held.handle, b"frame")
    tail = await tailing(play, e, after=first.stream_id, block_ms=20_000)

    await play.engine.complete(held.handle)

    page, length = await tail
    assert page == StreamPage([], play.now, "attempt_success")
    assert length < 10


@pytest.mark.spec("SS-053")
async def test_hidden_frames_do_not_wake(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    given = {"after": "0-0", "block_ms": 20_000, "count_limit": 1}
    shy = await tailing(play, e, visibility="exclude_best_effort", **given)
    keen = await tailing(play, e, visibility=Visibility.ALL, **given)

    await best_effort(play, held, b"live", ttl_ms=60_000)
    page, _ = await keen
    assert texts(page) == ["live"]
    assert not shy.done()
    await play.engine.append_frame(held.handle, b"kept")
    page, _ = await shy
    assert texts(page) == ["kept"]


@pytest.mark.spec("SS-054")
async def test_best_effort_ttl(play: Play) -> None:
    held = await play.claimed(ttl=1_000_000)
    e = held.execution_id
    for number in (1, 2):
        assert await best_effort(play, held, ttl_ms=5000) == number
    play.clock.advance_ms(9_999)
    assert len((await play.engine.read_stream(e, 0)).frames) == 2
    play.clock.advance_ms(2)
    assert (await play.engine.read_stream(e, 0)).frames == []

    assert await best_effort(play, held, b"new", ttl_ms=5000) == 3
    assert texts(await play.engine.read_stream(e, 0)) == ["new"]
    await play.engine.append_frame(held.handle, b"durable")
    await best_effort(play, held, b"later", ttl_ms=5000)
    play.clock.advance_ms(100_000)
    assert texts(await play.engine.read_stream(e, 0)) == ["new", "durable", "later"]


@pytest.mark.spec("SS-055")
async def test_ids_survive_clock_steps(play: Play) -> None:
    play.clock.now = 1000
    held = await play.claimed(ttl=10**9)
    first = await play.engine.append_frame(held.handle, b"a")
    assert first.stream_id == "1000-0"
    play.clock.now = 900

    second = await play.engine.append_frame(held.handle, b"b")

    assert second.stream_id == "1000-1"
    assert texts(await play.engine.tail_stream(held.execution_id, 0, after="1000-0")) == ["b"]


@pytest.mark.spec("SS-056")
async def test_waiting_tails_do_not_starve_writers(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    tails = [await tailing(play, e, after="0-0", block_ms=20_000) for _ in range(32)]

    begun = time.monotonic()
    await play.engine.append_frame(held.handle, b"for all")
    assert time.monotonic() - begun < 5

    pages = [(await tail)[0] for tail in tails]
    assert {tuple(texts(page)) for page in pages} == {("for all",)}


async def test_frames_beyond_the_limit_are_refused_before_the_lease_is_asked_about(play: Play) -> None:
    held = await play.claimed()
    await play.engine.append_frame(held.handle, b"x" * 65_536)
    await play.engine.complete(held.handle)

    async with play.refused(errors.RetentionLimitExceeded):
        await play.engine.append_frame(held.handle, b"x" * 65_537)


async def test_exactly_the_newest_frames_survive(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    await asyncio.gather(*(play.engine.append_frame(held.handle, b"%d" % n) for n in range(1, 1200)))
    assert len((await play.engine.read_stream(e, 0, count_limit=10_000)).frames) == 1199

    last = await play.engine.append_frame(held.handle, b"{}", mode="summary")

    page = await play.engine.read_stream(e, 0, count_limit=10_000)
    assert last.frame_count == 1200
    assert texts(page) == [*(str(n) for n in range(1137, 1200)), "{}"]
    ids = [tuple(map(int, frame.id.split("-"))) for frame in page.frames]
    assert ids == sorted(set(ids))
    kept = (await play.everything())["ff_frame"]
    assert len(kept) < 1200  # whole pages of frames that count no more are gone


async def test_best_effort_keeps_as_many_as_its_rate_asks_for(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    seen = []
    for _ in range(4):
        await best_effort(play, held, ttl_ms=10_000)
        info = await play.engine.read_stream_info(e, 0)
        assert info is not None
        seen.append((round(info.ema_rate_hz or 0, 4), info.maxlen_applied_last))
        play.clock.advance_ms(10)

    assert seen == [(3.2, 64), (22.56, 452), (38.048, 761), (50.4384, 1009)]


async def test_more_readers_than_there_is_room_for_are_turned_away(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    tails = [await tailing(play, e, block_ms=20_000) for _ in range(64)]

    with pytest.raises(errors.ResourceExhausted) as refusal:
        await play.engine.read_stream(e, 0)
    assert (refusal.value.pool, refusal.value.max, refusal.value.retry_after_ms) == ("stream_ops", 64, 1600)

    await play.engine.shutdown_prepare()
    pages = {len((await tail)[0].frames) for tail in tails}
    assert pages == {0}
    with pytest.raises(errors.Unavailable) as closing:
        await play.engine.tail_stream(e, 0)
    assert closing.value.op == "stream_ops"
