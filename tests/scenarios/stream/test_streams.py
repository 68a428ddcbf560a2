"""SS-047 to SS-056 and EX-036: frames of an attempt, appended by its holder, and how readers tail them."""

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
from tests.scenarios.env import LEASE_MS, Env
from tests.scenarios.waits import Waits, until


def payloads(page: StreamPage) -> list[str]:
    return [frame.fields["payload"] for frame in page.frames]


async def best_effort(env: Env, claim: Claimed, payload: bytes = b"x", **options: int) -> int:
    mode = BestEffort(**options)
    appended = await env.engine.append_frame(claim.handle, payload, mode=FrameMode.BEST_EFFORT, best_effort=mode)
    return appended.frame_count


@pytest.mark.spec("SS-047")
async def test_appended_frames_are_read_in_order(env: Env) -> None:
    claim = await env.create_and_claim()

    first = await env.engine.append_frame(claim.handle, b"hello", frame_type="log")
    env.clock.advance_ms(3)
    second = await env.engine.append_frame(claim.handle, b"done", frame_type="output", correlation_id="c")

    assert (first.frame_count, second.frame_count) == (1, 2)
    assert (first.stream_id, second.stream_id) == (f"{env.now - 3}-0", f"{env.now}-0")
    page = await env.engine.read_stream(claim.execution_id, 0, "start", "end", 100)
    common = {"encoding": "utf8", "source": "worker", "mode": "durable"}
    assert [frame.id for frame in page.frames] == [first.stream_id, second.stream_id]
    assert [frame.fields for frame in page.frames] == [
        {"frame_type": "log", "payload": "hello", "ts": str(env.now - 3), **common},
        {"frame_type": "output", "payload": "done", "ts": str(env.now), "correlation_id": "c", **common},
    ]
    assert (page.closed_at, page.closed_reason) == (None, None)


@pytest.mark.spec("SS-047")
async def test_binary_payloads_are_read_as_base64(env: Env) -> None:
    claim = await env.create_and_claim()
    await env.engine.append_frame(claim.handle, b"\xff\x00", kind="blob")

    [frame] = (await env.engine.read_stream(claim.execution_id, 0)).frames

    assert (frame.fields["payload"], frame.fields["encoding"]) == ("/wA=", "base64")
    assert frame.fields["frame_type"] == "blob"


@pytest.mark.spec("SS-048")
async def test_a_stale_holder_cannot_append(env: Env) -> None:
    claim = await env.create_and_claim()
    fields = claim.handle.fields
    wrong: list[dict[str, Any]] = [
        {"lease_epoch": 2},
        {"attempt_index": 1},
        {"lease_id": "99999999-9999-4999-8999-999999999999"},
    ]
    for change in wrong:
        values = {name: getattr(fields, name) for name in fields.__struct_fields__} | change
        handle = Handle.mint(claim.handle.backend, HandleKind.FRESH, type(fields)(**values))
        async with env.refused(errors.StaleOwnerCannotAppend):
            await env.engine.append_frame(handle, b"late")
    env.clock.advance_ms(LEASE_MS)
    async with env.refused(errors.StaleOwnerCannotAppend):
        await env.engine.append_frame(claim.handle, b"late")
    assert (await env.vector(claim.execution_id)).startswith("active/leased/")
    revoked = await env.create_and_claim()
    await env.revoke_lease(revoked)
    async with env.refused(errors.StaleOwnerCannotAppend):
        await env.engine.append_frame(revoked.handle, b"late")


@pytest.mark.spec("SS-048")
async def test_a_stream_of_an_inactive_execution_is_closed(env: Env, waits: Waits) -> None:
    endings: dict[str, Callable[[Claimed], Awaitable[object]]] = {
        "complete": lambda claim: env.engine.complete(claim.handle),
        "fail": lambda claim: env.engine.fail(claim.handle, reason="no", category="permanent"),
        "cancel": lambda claim: env.engine.cancel(claim.handle),
        "suspend": lambda claim: waits.suspend(claim),
    }
    for end in endings.values():
        claim = await env.create_and_claim()
        await end(claim)
        async with env.refused(errors.StreamClosed):
            await env.engine.append_frame(claim.handle, b"late")


@pytest.mark.spec("SS-049")
async def test_a_stream_records_why_it_was_closed(env: Env, waits: Waits) -> None:
    async def time_out(claim: Claimed) -> None:
        env.clock.now = (await env.core(claim.execution_id))["attempt_timeout_at"]
        await env.engine.sweep_once("attempt_timeout")

    async def suspended_too_long(claim: Claimed) -> None:
        await waits.suspend(claim, timeout_at=env.now + 5)
        await waits.time_out(env.now + 5)

    policy = {"timeout_policy": {"attempt_timeout_ms": 1000}}
    endings: dict[str, Callable[[Claimed], Awaitable[object]]] = {
        "attempt_success": lambda claim: env.engine.complete(claim.handle),
        "attempt_failure": lambda claim: env.engine.fail(claim.handle, reason="no"),
        "attempt_cancelled": lambda claim: env.engine.cancel_execution(claim.execution_id),
        "expired": time_out,
        "suspension_timeout": suspended_too_long,
    }
    for reason, end in endings.items():
        claim = await env.create_and_claim(policy=policy)
        await env.engine.append_frame(claim.handle, b"frame")
        await end(claim)
        for page in (
            await env.engine.read_stream(claim.execution_id, 0),
            await env.engine.tail_stream(claim.execution_id, 0),
        ):
            assert (page.closed_at, page.closed_reason, payloads(page)) == (env.now, reason, ["frame"])
    silent = await env.create_and_claim()
    await env.engine.complete(silent.handle)
    assert await env.engine.read_stream(silent.execution_id, 0) == StreamPage([])


@pytest.mark.spec("SS-049")
async def test_a_retried_failure_closes_the_stream_of_its_attempt(env: Env) -> None:
    claim, e = await env.create_claimed(policy={"retry_policy": {"max_retries": 1}})
    t = env.now
    await env.engine.append_frame(claim.handle, b"first")
    await env.engine.fail(claim.handle, reason="flaky")
    await env.promote(e)
    again = await env.grant_and_claim(e)
    await env.engine.append_frame(again.handle, b"second")

    first, second = await env.engine.read_stream(e, 0), await env.engine.read_stream(e, 1)

    assert (first.closed_at, first.closed_reason, payloads(first)) == (t, "attempt_failure", ["first"])
    assert (second.closed_at, second.closed_reason, payloads(second)) == (None, None, ["second"])


@pytest.mark.spec("SS-049")
async def test_a_reclaim_closes_a_stream_that_is_still_open(env: Env) -> None:
    claim, other = await env.create_and_claim(), await env.create_and_claim()
    for one in (claim, other):
        await env.engine.append_frame(one.handle, b"frame")
    await env.revoke_lease(claim)
    await env.grant_and_reclaim(claim.execution_id)
    assert (await env.engine.read_stream(claim.execution_id, 0)).closed_reason == "reclaimed"
    await env.expire_lease(other)
    later = await env.grant_and_reclaim(other.execution_id)
    assert (await env.engine.read_stream(other.execution_id, 0)).closed_reason == "lease_expired"

    await env.engine.append_frame(later.handle, b"anew")
    assert payloads(await env.engine.read_stream(other.execution_id, 1)) == ["anew"]
    assert payloads(await env.engine.read_stream(other.execution_id, 0)) == ["frame"]


@pytest.mark.spec("EX-036")
async def test_lease_expiry_closes_the_stream_once(env: Env) -> None:
    silent, written = await env.create_and_claim(), await env.create_and_claim()
    await env.engine.append_frame(written.handle, b"frame")

    await env.expire_lease(silent)
    await env.expire_lease(written)

    page = await env.engine.read_stream(written.execution_id, 0)
    assert (page.closed_at, page.closed_reason) == (env.now, "lease_expired")
    assert await env.engine.read_stream_info(silent.execution_id, 0) is None
    env.clock.advance_ms(5)
    await env.engine.mark_lease_expired_if_due(written.execution_id)
    await env.engine.cancel_execution(written.execution_id)
    assert await env.engine.read_stream(written.execution_id, 0) == page


@pytest.mark.spec("SS-050")
@pytest.mark.parametrize(
    ("text", "cause"),
    [("", "empty"), ("-", "bare marker"), ("+", "bare marker")]
    + [(text, "malformed") for text in ("abc", "12-", "-5", "1-2-3", "１", " 1", "1 ", "9" * 21)],
)
def test_a_malformed_stream_cursor_is_refused(text: str, cause: str) -> None:
    with pytest.raises(errors.InvalidInput, match=cause):
        parse_cursor(text)


@pytest.mark.spec("SS-050")
async def test_stream_cursors_and_counts_are_validated(env: Env) -> None:
    accepted = ["start", "end", "123", "123-4"]
    assert [parse_cursor(text) for text in accepted] == ["start", "end", (123, None), (123, 4)]
    for text in ("start", "end"):
        with pytest.raises(errors.InvalidInput):
            await env.engine.tail_stream(env.engine.new_execution_id(), 0, after=text)
    for count, detail in ((0, "count_limit must be >= 1"), (10_001, "count_limit_exceeds_hard_cap")):
        with pytest.raises(errors.InvalidInput) as refusal:
            await env.engine.read_stream(env.engine.new_execution_id(), 0, "start", "end", count)
        assert refusal.value.detail == detail


@pytest.mark.spec("SS-050")
async def test_a_read_includes_both_bounds(env: Env) -> None:
    claim, e = await env.create_claimed()
    t = env.now
    for text in (b"a", b"b"):
        await env.engine.append_frame(claim.handle, text)
    env.clock.advance_ms(1)
    await env.engine.append_frame(claim.handle, b"c")

    async def between(first: str, last: str, count: int = 100) -> list[str]:
        return payloads(await env.engine.read_stream(e, 0, first, last, count))

    assert await between(f"{t}-1", "end") == ["b", "c"]
    assert await between("start", f"{t}-0") == ["a"]
    assert await between(f"{t}", f"{t}") == ["a", "b"]
    assert await between("start", "end", 2) == ["a", "b"]
    assert await between("end", "start") == []
    assert payloads(await env.engine.tail_stream(e, 0, after=f"{t}")) == ["b", "c"]
    assert payloads(await env.engine.tail_stream(e, 0, after=f"{t}-1")) == ["c"]


async def tailing(env: Env, e: str, **options: object) -> asyncio.Task[tuple[StreamPage, float]]:
    """Start a tail and wait until it blocks."""

    async def timed() -> tuple[StreamPage, float]:
        started = time.monotonic()
        page = await env.engine.tail_stream(e, 0, **options)  # type: ignore[arg-type]
        return page, time.monotonic() - started

    waiting = env.engine.runtime.wakeups.subscriber_count(stream_topic(e))
    task = asyncio.create_task(timed())
    await until(lambda: env.engine.runtime.wakeups.subscriber_count(stream_topic(e)) > waiting)
    return task


@pytest.mark.spec("SS-051")
async def test_a_tail_waits_for_a_frame_or_its_timeout(env: Env) -> None:
    claim, e = await env.create_claimed()
    tail = await tailing(env, e, after="0-0", block_ms=20_000)
    await env.engine.append_frame(claim.handle, b"wake")

    page, length = await tail
    assert payloads(page) == ["wake"]
    assert length < 10
    last = page.frames[-1].id
    started = time.monotonic()
    assert await env.engine.tail_stream(e, 0, after=last, block_ms=200) == StreamPage([])
    assert 0.19 <= time.monotonic() - started < 10
    assert await env.engine.tail_stream(e, 0, after=last, block_ms=0) == StreamPage([])


@pytest.mark.spec("SS-052")
async def test_a_tail_ends_when_the_stream_closes(env: Env) -> None:
    claim = await env.create_and_claim()
    first = await env.engine.append_frame(claim.handle, b"frame")
    tail = await tailing(env, claim.execution_id, after=first.stream_id, block_ms=20_000)

    await env.engine.complete(claim.handle)

    page, length = await tail
    assert page == StreamPage([], env.now, "attempt_success")
    assert length < 10


@pytest.mark.spec("SS-053")
async def test_a_tail_ignores_frames_it_cannot_see(env: Env) -> None:
    claim = await env.create_and_claim()
    options = {"after": "0-0", "block_ms": 20_000, "count_limit": 1}
    durable_only = await tailing(env, claim.execution_id, visibility="exclude_best_effort", **options)
    all_frames = await tailing(env, claim.execution_id, visibility=Visibility.ALL, **options)

    await best_effort(env, claim, b"live", ttl_ms=60_000)
    page, _ = await all_frames
    assert payloads(page) == ["live"]
    assert not durable_only.done()
    await env.engine.append_frame(claim.handle, b"kept")
    page, _ = await durable_only
    assert payloads(page) == ["kept"]


@pytest.mark.spec("SS-054")
async def test_best_effort_frames_expire(env: Env) -> None:
    claim, e = await env.create_claimed(ttl=1_000_000)
    for number in (1, 2):
        assert await best_effort(env, claim, ttl_ms=5000) == number
    env.clock.advance_ms(9_999)
    assert len((await env.engine.read_stream(e, 0)).frames) == 2
    env.clock.advance_ms(2)
    assert (await env.engine.read_stream(e, 0)).frames == []

    assert await best_effort(env, claim, b"new", ttl_ms=5000) == 3
    assert payloads(await env.engine.read_stream(e, 0)) == ["new"]
    await env.engine.append_frame(claim.handle, b"durable")
    await best_effort(env, claim, b"later", ttl_ms=5000)
    env.clock.advance_ms(100_000)
    assert payloads(await env.engine.read_stream(e, 0)) == ["new", "durable", "later"]


@pytest.mark.spec("SS-055")
async def test_frame_ids_grow_when_the_clock_goes_back(env: Env) -> None:
    env.clock.now = 1000
    claim = await env.create_and_claim(ttl=10**9)
    first = await env.engine.append_frame(claim.handle, b"a")
    assert first.stream_id == "1000-0"
    env.clock.now = 900

    second = await env.engine.append_frame(claim.handle, b"b")

    assert second.stream_id == "1000-1"
    assert payloads(await env.engine.tail_stream(claim.execution_id, 0, after="1000-0")) == ["b"]


@pytest.mark.spec("SS-056")
async def test_waiting_tails_do_not_starve_writers(env: Env) -> None:
    claim = await env.create_and_claim()
    tails = [await tailing(env, claim.execution_id, after="0-0", block_ms=20_000) for _ in range(32)]

    started = time.monotonic()
    await env.engine.append_frame(claim.handle, b"for all")
    assert time.monotonic() - started < 5

    pages = [(await tail)[0] for tail in tails]
    assert {tuple(payloads(page)) for page in pages} == {("for all",)}


async def test_an_oversized_frame_is_refused_before_the_lease_is_checked(env: Env) -> None:
    claim = await env.create_and_claim()
    await env.engine.append_frame(claim.handle, b"x" * 65_536)
    await env.engine.complete(claim.handle)

    async with env.refused(errors.RetentionLimitExceeded):
        await env.engine.append_frame(claim.handle, b"x" * 65_537)


async def test_a_trimmed_stream_keeps_exactly_the_newest_frames(env: Env) -> None:
    claim = await env.create_and_claim()
    await asyncio.gather(*(env.engine.append_frame(claim.handle, b"%d" % n) for n in range(1, 1200)))
    assert len((await env.engine.read_stream(claim.execution_id, 0, count_limit=10_000)).frames) == 1199

    last = await env.engine.append_frame(claim.handle, b"{}", mode="summary")

    page = await env.engine.read_stream(claim.execution_id, 0, count_limit=10_000)
    assert last.frame_count == 1200
    assert payloads(page) == [*(str(n) for n in range(1137, 1200)), "{}"]
    ids = [tuple(map(int, frame.id.split("-"))) for frame in page.frames]
    assert ids == sorted(set(ids))
    kept = (await env.dump())["ff_frame"]
    assert len(kept) < 1200  # pages of trimmed frames are deleted


async def test_the_best_effort_limit_follows_the_frame_rate(env: Env) -> None:
    claim = await env.create_and_claim()
    seen = []
    for _ in range(4):
        await best_effort(env, claim, ttl_ms=10_000)
        info = await env.engine.read_stream_info(claim.execution_id, 0)
        assert info is not None
        seen.append((round(info.ema_rate_hz or 0, 4), info.maxlen_applied_last))
        env.clock.advance_ms(10)

    assert seen == [(3.2, 64), (22.56, 452), (38.048, 761), (50.4384, 1009)]


async def test_readers_beyond_the_limit_are_refused(env: Env) -> None:
    _, e = await env.create_claimed()
    tails = [await tailing(env, e, block_ms=20_000) for _ in range(64)]

    with pytest.raises(errors.ResourceExhausted) as refusal:
        await env.engine.read_stream(e, 0)
    assert (refusal.value.pool, refusal.value.max, refusal.value.retry_after_ms) == ("stream_ops", 64, 1600)

    await env.engine.shutdown_prepare()
    pages = {len((await tail)[0].frames) for tail in tails}
    assert pages == {0}
    with pytest.raises(errors.Unavailable) as closing:
        await env.engine.tail_stream(e, 0)
    assert closing.value.op == "stream_ops"
