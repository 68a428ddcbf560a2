"""Random sequences of calls get the same answers from every store as from the memory store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowfabric.clock import ManualClock
from flowfabric.model.change import Change, Delete, Guard, Insert, LeaseCheck, LeaseRequirement, Patch, Upsert, Write
from flowfabric.model.event import Event, Topic
from flowfabric.model.execution import Attempt, Execution, IdempotencyKey, Payload, QueueKey, Result
from flowfabric.model.instant import NOW, FromNow
from flowfabric.model.states import AttemptRecordState, AttemptType, LifecyclePhase
from flowfabric.rules.execution.lease import RENEWAL
from flowfabric.stores.claims import ClaimRequest, LeaseIds, LeaseRef
from flowfabric.stores.codec import CODEC
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Read, Scan, Where
from tests.stores.sample_rows import claim_template, execution, payload

NAMES = ["a", "b", "c", "d"]
LINES = [QueueKey("mail"), QueueKey("mail", "gpu"), QueueKey("sms", "", "t", 2, True)]
TABLES: list[type[msgspec.Struct]] = [Execution, Payload, Result, Attempt, IdempotencyKey]

names = st.sampled_from(NAMES)
lines = st.sampled_from(LINES)
offsets = st.integers(-30, 60)
instants = st.none() | offsets.map(FromNow)
kinds = st.none() | st.sampled_from(AttemptType)
texts = st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5)

fields = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.integers(-3, 3),
        "lifecycle_phase": st.sampled_from(LifecyclePhase),
        "tags": texts,
        "line": st.none() | lines,
        "rank": st.integers(-2, 2) | offsets.map(FromNow),
        "next_type": kinds,
        "next_timeout_ms": st.none() | st.integers(0, 50),
        "total_attempt_count": st.integers(0, 2),
        "granted_until": instants,
        "delay_until": instants,
        "lease_expires_at": instants,
        "lease_id": st.none() | st.sampled_from(["l0", "l1"]),
        "lease_epoch": st.integers(0, 3),
        "started_at": instants,
    },
)


@cache
def writes_about(name: str) -> st.SearchStrategy[Write]:
    """Writes of one execution, so that no two changes of a batch overlap."""
    indexes = st.integers(0, 2)
    attempts = st.builds(
        lambda index, kind, state, offset, text: Attempt(
            name, index, "id", kind, state, FromNow(offset), "l", 1, "w", "i", lineage=text
        ),
        indexes,
        st.sampled_from(AttemptType),
        st.sampled_from(AttemptRecordState),
        offsets,
        texts,
    )
    rows: st.SearchStrategy[msgspec.Struct] = st.one_of(
        st.builds(lambda given: execution(name, **given), fields),
        st.builds(lambda given: execution(name, **given), fields),
        st.builds(lambda content: payload(name, content), st.none() | st.binary(max_size=5)),
        st.builds(lambda content, text: Result(name, content, text), st.binary(max_size=5), texts),
        st.builds(lambda offset: IdempotencyKey(0, name, "x", FromNow(offset)), offsets),
        attempts,
    )
    unless = st.none() | st.sampled_from(["lease_id", "started_at", "line"])
    patches = st.one_of(
        st.builds(lambda given, field: Patch(Execution, (name,), given, field), fields.filter(bool), unless),
        st.builds(
            lambda index, text: Patch(Attempt, (name, index), {"lineage": text, "ended_at": NOW}), indexes, texts
        ),
    )
    deletes = st.one_of(
        st.sampled_from(TABLES[:4]).map(lambda row: Delete(row, (name,))),
        indexes.map(lambda index: Delete(Attempt, (name, index))),
    )
    return st.one_of(rows.map(Insert), rows.map(Upsert), rows.map(Upsert), patches, patches, deletes)


events = st.builds(
    Event,
    names,
    st.just("ns"),
    tags=texts,
    lease=st.none() | st.just("x"),
    outcome=st.none() | st.just("y"),
    operator=st.none() | st.just("z"),
    lease_epoch=st.none() | st.integers(0, 3),
)


class Play:
    """A store, its clock, and what was observed of it."""

    def __init__(self, store: Store, clock: ManualClock, begin: int) -> None:
        self.store = store
        self.clock = clock
        self.begin = begin  # the position of the feed
        self.answers: list[Any] = []
        self.step = 0

    async def note(self, call: Awaitable[Any]) -> None:
        self.answers.append(await call)

    async def observe(self) -> None:
        """Record everything that can be read."""
        self.answers.append((await self.store.load([Read(row, ()) for row in TABLES])).rows)
        for topic in Topic:
            page = await self.store.feed(topic, self.begin, 1000)
            self.answers.append([(found.at, found.event) for found in page.events])
        for column in ("delay_until", "lease_expires_at"):
            self.answers.append(await self.store.due(Execution, column, limit=2))


Act = Callable[[Play], Awaitable[None]]


@st.composite
def commits(draw: st.DrawFn) -> Act:
    """Changes of different executions; the guards are mostly right and sometimes wrong."""
    made = []
    for name in draw(st.lists(names, unique=True, min_size=1)):
        owned = draw(st.lists(writes_about(name), max_size=4))
        guard = draw(st.sampled_from(["none", "absent", "seen", "stale", "live", "lapsed"]))
        emitted = draw(st.lists(events, max_size=2))
        bounds = draw(st.fixed_dictionaries({}, optional={"not_before": offsets, "not_after": offsets}))
        made.append((name, guard, owned, emitted, bounds))

    async def act(play: Play) -> None:
        changes = []
        for number, (name, guard, owned, emitted, bounds) in enumerate(made):
            ((*found,),) = (await play.store.load([Read(Execution, (name,))])).rows
            at: dict[str, Any] = {bound: play.clock.now + offset for bound, offset in bounds.items()}
            guards = _guards(name, guard, found[0] if found else None)
            changes.append(Change(guards, tuple(owned), tuple(emitted), **at, id=play.step * 100 + number))
        await play.note(play.store.commit(changes))

    return act


def _guards(name: str, kind: str, row: Execution | None) -> tuple[Guard, ...]:
    if kind == "none":
        return ()
    if kind == "absent" or row is None:
        return (Guard(Execution, (name,), None if kind == "absent" else 5),)
    revision = row.revision + (kind == "stale")
    if kind in ("live", "lapsed"):
        want = LeaseRequirement.LIVE if kind == "live" else LeaseRequirement.EXPIRED
        return (Guard(Execution, (name,), revision, LeaseCheck(want, row.lease_id or "", row.lease_epoch)),)
    return (Guard(Execution, (name,), revision),)


@st.composite
def claims(draw: st.DrawFn) -> Act:
    asked = tuple(draw(st.lists(lines, unique=True, max_size=3)))
    number, ttl = draw(st.integers(0, 3)), draw(st.integers(1, 40))

    async def act(play: Play) -> None:
        there = {row.execution_id for row in (await play.store.load([Read(Payload, ())])).rows[0]}
        missing = [Upsert(payload(name, name.encode())) for name in NAMES if name not in there]
        await play.store.commit([Change((), tuple(missing))])  # Every execution has a payload.
        lease_ids = tuple(LeaseIds(f"l{n}", f"t{play.step}-{n}", play.step * 100 + n) for n in range(number))
        await play.note(play.store.claim_rows(ClaimRequest(asked, lease_ids, "w", "i", ttl, claim_template())))

    return act


@st.composite
def renewals(draw: st.DrawFn) -> Act:
    asked = draw(st.lists(st.tuples(names, st.integers(0, 3).map(lambda n: n == 0), st.integers(1, 40)), max_size=3))

    async def act(play: Play) -> None:
        leases = []
        for name in sorted({name for name, _, _ in asked}):
            _, wrong, ttl = next(one for one in asked if one[0] == name)
            ((*found,),) = (await play.store.load([Read(Execution, (name,))])).rows
            for row in found:
                index = row.attempt_index or 0
                leases.append(
                    LeaseRef(name, index, row.attempt_id or "", row.lease_id or "", row.lease_epoch + wrong, ttl)
                )
        await play.note(play.store.renew(leases, RENEWAL))

    return act


@st.composite
def passings(draw: st.DrawFn) -> Act:
    length = draw(st.integers(0, 40))

    async def act(play: Play) -> None:
        play.clock.advance_ms(length)

    return act


@st.composite
def scans(draw: st.DrawFn) -> Act:
    conditions: list[Where] = draw(
        st.lists(
            st.one_of(
                st.builds(Where, st.just("priority"), st.sampled_from(["=", "<", "<=", ">", ">="]), st.integers(-3, 3)),
                st.builds(Where, st.just("tags"), st.sampled_from(["set", "unset"])),
                st.builds(Where, st.just("tags"), st.just("starts"), texts.map(lambda text: (text or "")[:1])),
                st.builds(Where, st.just("line"), st.just("in"), st.lists(lines).map(tuple)),
                st.builds(Where, st.just("lifecycle_phase"), st.just("<="), st.sampled_from(LifecyclePhase)),
            ),
            max_size=2,
        )
    )
    order = draw(st.sampled_from([(), ("priority",), ("lifecycle_phase", "priority"), ("rank",)]))
    limit = draw(st.integers(0, 5))

    async def act(play: Play) -> None:
        await play.note(play.store.scan(Scan(Execution, tuple(conditions), order, None, limit)))

    return act


lives = st.lists(
    st.one_of(commits(), commits(), commits(), claims(), claims(), renewals(), passings(), scans()), max_size=12
)


async def _play(store: Store, clock: ManualClock, sequence: list[Act]) -> list[Any]:
    """Play a sequence on a store that is emptied first."""
    rows = (await store.load([Read(row, ()) for row in TABLES])).rows
    keys = [(type(row), CODEC[type(row)].key(row)) for found in rows for row in found]
    await store.commit([Change((), tuple(Delete(*key) for key in keys))])
    play = Play(store, clock, await store.feed_end())
    for act in sequence:
        play.step += 1
        await act(play)
        await play.observe()
    return play.answers


async def assert_agreement(store: Store, clock: ManualClock, examples: int) -> None:
    """Assert that a store answers so many random sequences like the memory store."""
    begin = clock.now
    loop = asyncio.get_running_loop()

    def live(sequence: list[Act]) -> None:
        other = ManualClock(begin)
        expected = asyncio.run(_play(MemoryStore(other), other, sequence))
        clock.now = begin
        answers = asyncio.run_coroutine_threadsafe(_play(store, clock, sequence), loop).result(60)
        assert answers == expected

    relaxed = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    await asyncio.to_thread(relaxed(given(lives)(live)))


async def test_every_store_answers_like_the_memory_store(store: Store, clock: ManualClock) -> None:
    await assert_agreement(store, clock, 25)


@pytest.mark.soak
@pytest.mark.timeout(0)
async def test_every_store_answers_very_many_sequences_like_the_memory_store(store: Store, clock: ManualClock) -> None:
    await assert_agreement(store, clock, 1000)
