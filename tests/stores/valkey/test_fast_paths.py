"""Fast paths write the same keys as the interpreter, and are left for everything unusual."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowfabric.clock import ManualClock
from flowfabric.errors import Corruption
from flowfabric.model.change import (
    BulkInsert,
    Change,
    Delete,
    Guard,
    Insert,
    LeaseCheck,
    LeaseRequirement,
    Patch,
    Upsert,
    Write,
)
from flowfabric.model.execution import Execution, IdempotencyKey, Payload, QueueKey, Result
from flowfabric.model.instant import NOW, FromNow
from flowfabric.model.states import AttemptType, LifecyclePhase
from flowfabric.rules.execution.lease import CLAIM, RENEWAL
from flowfabric.rules.execution.transitions import success_template
from flowfabric.stores.claims import ClaimRequest, LeaseIds, LeaseRef
from flowfabric.stores.queries import Read
from flowfabric.stores.valkey import store as store_module
from flowfabric.stores.valkey.rows.batch import partition_batches
from flowfabric.stores.valkey.rows.codec import VALKEY_TABLES
from flowfabric.stores.valkey.store import ValkeyStore
from tests.stores.sample_rows import change, event, one, payload, queued
from tests.stores.valkey.contents import contents, opened, replaced

HOME = "{fp:3}"
NAMES = [f"{HOME}:0190c0de-0000-7000-8000-00000000000{digit}" for digit in range(6)]
MAIL = QueueKey("mail")
INTERPRETED = ("local ALIKE = 3", "local ALIKE = 1000000")  # no group of rows is large enough


# Random sequences

texts = st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
instants = st.none() | st.integers(-30, 60).map(FromNow) | st.integers(0, 2**62)
usual = st.fixed_dictionaries(  # a row with these is claimed and ended without a rule
    {},
    optional={
        "priority": st.integers(-200, 70000),
        "tags": texts,
        "rank": st.integers(-30, 60).map(FromNow),
        "next_timeout_ms": st.none() | st.integers(0, 50),
        "total_attempt_count": st.integers(0, 300),
        "started_at": instants,
    },
)
any_fields = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.integers(-(2**62), 2**62) | st.integers(-200, 70000),
        "lifecycle_phase": st.sampled_from(LifecyclePhase),
        "tags": texts,
        "line": st.none() | st.just(MAIL),
        "rank": st.integers(-(2**62), 2**62) | st.integers(-30, 60).map(FromNow),
        "next_type": st.none() | st.sampled_from(AttemptType),
        "next_timeout_ms": st.none() | st.integers(0, 50),
        "total_attempt_count": st.integers(0, 300),
        "granted_until": instants,
        "delay_until": instants,
        "deadline_at": instants,
        "started_at": instants,
        "attempt_timeout_at": instants,
        "parent_id": st.none() | st.just("parent"),
        "blocked_on": st.none() | st.just("q"),
        "lease_expires_at": instants,
        "progress_pct": st.none() | st.integers(0, 100),
    },
)
fields = st.one_of(st.just(dict[str, Any]()), usual, usual, any_fields)


class Play:
    """A store, its clock and what it answered."""

    def __init__(self, store: ValkeyStore, clock: ManualClock) -> None:
        self.store = store
        self.clock = clock
        self.step = 0
        self.answers: list[Any] = []

    async def rows(self) -> list[Execution]:
        found = (await self.store.load([Read(Execution, (name,)) for name in NAMES])).rows
        return [row for rows in found for row in rows]

    async def commit(self, *changes: Change) -> None:
        numbered = [msgspec.structs.replace(one, id=self.step * 100 + n) for n, one in enumerate(changes)]
        self.answers.append(await self.store.commit(numbered))


Act = Callable[[Play], Awaitable[None]]
names = st.sampled_from(NAMES)


@st.composite
def inserts(draw: st.DrawFn, given: st.SearchStrategy[dict[str, Any]] = fields) -> Act:
    """Rows that are alike, in one bulk insert or one by one."""
    chosen, given_fields = draw(st.lists(names, unique=True, min_size=1)), draw(given)
    model = msgspec.structs.replace(queued("model"), **given_fields)
    bulk, together = draw(st.booleans()), draw(st.booleans())

    async def act(play: Play) -> None:
        if bulk:
            contents_of = [name.encode() for name in chosen]
            columns: dict[str, Sequence[Any]] = {"execution_id": chosen, "input_payload": contents_of}
            rows = BulkInsert(model, {"execution_id": chosen})
            await play.commit(Change((), (rows, BulkInsert(payload("model"), columns))))
            return
        made = [
            Change((), (Insert(msgspec.structs.replace(model, execution_id=name)), Upsert(payload(name, None))))
            for name in chosen
        ]
        for batch in [made] if together else [[single] for single in made]:
            await play.commit(*batch)
            play.step += 1

    return act


@st.composite
def writes(draw: st.DrawFn) -> Act:
    """Several writes of one execution, so that packed and interpreted rows meet in one change."""
    name = draw(names)
    options: list[st.SearchStrategy[Write]] = [
        fields.map(lambda given: Upsert(queued(name, **given))),
        fields.map(lambda given: Insert(queued(name, **given))),
        fields.filter(bool).map(lambda given: Patch(Execution, (name,), given)),
        st.just(Delete(Execution, (name,))),
        st.binary(max_size=5).map(lambda content: Upsert(Result(name, content))),
        st.integers(-9, 9).map(lambda n: Upsert(IdempotencyKey(3, "k", name, FromNow(n)))),
        st.just(Delete(Result, (name,))),
    ]
    made = draw(st.lists(st.one_of(options), min_size=1, max_size=4))
    emits = draw(st.booleans())

    async def act(play: Play) -> None:
        await play.commit(Change((), tuple(made), (event(name, lease="x"),) if emits else ()))

    return act


@st.composite
def claims(draw: st.DrawFn) -> Act:
    number, ttl, length = draw(st.integers(1, 6)), draw(st.integers(1, 40)), draw(st.sampled_from([3, 16, 36]))
    is_uneven = draw(st.booleans())

    async def act(play: Play) -> None:
        there = {row.execution_id for row in (await play.store.load([Read(Payload, ())])).rows[0]}
        missing = [Upsert(payload(name, name.encode())) for name in NAMES if name not in there]
        await play.commit(Change((), tuple(missing)))
        ids = tuple(
            LeaseIds(
                f"l{play.step}-{n}".ljust(length + (n if is_uneven else 0), "x"),
                f"a{play.step}-{n}".ljust(length, "y"),
                play.step * 100 + 50 + n,
            )
            for n in range(number)
        )
        play.answers.append(await play.store.claim_rows(ClaimRequest((MAIL,), ids, "w", "i", ttl, CLAIM)))

    return act


@st.composite
def completions(draw: st.DrawFn) -> Act:
    """Completions of claimed rows, some of them wrong, twice, or with another write of the same row."""
    ways = st.sampled_from(["", "", "", "stale", "lease", "twice", "patch"])
    chosen = [(name, draw(ways)) for name in draw(st.lists(names, unique=True, min_size=3))]
    requires = draw(st.sampled_from([LeaseRequirement.LIVE, LeaseRequirement.LIVE, LeaseRequirement.EXPIRED, None]))

    async def act(play: Play) -> None:
        rows, changes = {row.execution_id: row for row in await play.rows()}, list[Change]()
        for name, wrong in chosen:
            row = rows.get(name)
            template = None if row is None else success_template(row)
            if row is None or template is None:
                continue
            lease = f"{row.lease_id}!" if wrong == "lease" else row.lease_id or ""
            held = None if requires is None else LeaseCheck(requires, lease, row.lease_epoch)
            guard = Guard(Execution, (name,), row.revision + (wrong == "stale"), held)
            end = Change((guard,), (Upsert(Result(name, b"R")),), template=template)
            if wrong == "patch":
                again = Patch(Execution, (name,), {"delay_until": NOW, "parent_id": "p", "purge_at": None})
                end = msgspec.structs.replace(end, writes=(again, *end.writes))
            changes += [end, end] if wrong == "twice" else [end]
        await play.commit(*changes)

    return act


@st.composite
def renewals(draw: st.DrawFn) -> Act:
    chosen, ttl = draw(st.lists(names, unique=True)), draw(st.integers(1, 40))

    async def act(play: Play) -> None:
        leases = [
            LeaseRef(row.execution_id, row.attempt_index or 0, row.attempt_id or "", row.lease_id, row.lease_epoch, ttl)
            for row in await play.rows()
            if row.execution_id in chosen and row.lease_id
        ]
        play.answers.append(await play.store.renew(leases, RENEWAL))

    return act


@st.composite
def passings(draw: st.DrawFn) -> Act:
    length = draw(st.integers(0, 20))

    async def act(play: Play) -> None:
        play.clock.advance_ms(length)

    return act


anything = st.one_of(inserts(), writes(), claims(), completions(), renewals(), passings())


@st.composite
def lives(draw: st.DrawFn) -> list[Act]:
    """Usual rows from insert to end, sometimes with something in between."""
    between = draw(st.lists(anything, max_size=1))
    return [draw(inserts(usual)), draw(claims()), *between, draw(completions())]


sequences = st.tuples(lives(), st.lists(anything, max_size=4), lives()).map(
    lambda parts: [*parts[0], *parts[1], *parts[2]]
)


async def test_random_changes_leave_the_same_keys_as_the_interpreter(
    vk: ValkeyStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, loop = clock.now, asyncio.get_running_loop()
    batches = partition_batches

    async def play(store: ValkeyStore, sequence: list[Act]) -> tuple[list[Any], list[dict[bytes, Any]]]:
        await store.client.call(HOME, "FLUSHDB")
        store.registry.forget_registrations()
        clock.now = begin
        play, found = Play(store, clock), list[dict[bytes, Any]]()
        for act in sequence:
            play.step += 1
            await act(play)
            found.append(await contents(store, HOME, feed_ids=False))
        return play.answers, found

    async with opened(vk, clock, replaced(INTERPRETED)) as interpreter:

        def chosen(changes: Any, counts: Any, digest_of: Any) -> Any:
            return batches(changes, counts, digest_of, packs=digest_of != interpreter.registry.digest_of)

        monkeypatch.setattr(store_module, "partition_batches", chosen)

        def both(sequence: list[Act]) -> None:
            fast, plain = (
                asyncio.run_coroutine_threadsafe(play(store, sequence), loop).result(60) for store in (vk, interpreter)
            )
            for (step, mine), expected in zip(enumerate(fast[1]), plain[1], strict=True):
                assert mine == expected, f"after step {step}"
            assert fast[0] == plain[0]

        relaxed = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        await asyncio.to_thread(relaxed(given(sequences)(both)))


# Each path is used, and left


async def alike(store: ValkeyStore, number: int = 5) -> list[Execution]:
    """Insert rows that are alike and claim them."""
    chosen = NAMES[:number]
    columns: dict[str, Sequence[Any]] = {"execution_id": chosen, "input_payload": [b"x"] * number}
    await store.commit(
        [change(BulkInsert(queued("model"), {"execution_id": chosen}), BulkInsert(payload("model"), columns))]
    )
    ids = tuple(LeaseIds(f"lease-{n:030}", f"attempt-{n:030}", 1000 + n) for n in range(number))
    claimed = (await store.claim_rows(ClaimRequest((MAIL,), ids, "w", "i", 1000, CLAIM))).rows
    return [row for row, _ in claimed]


def completed(row: Execution) -> Change:
    held = LeaseCheck(LeaseRequirement.LIVE, row.lease_id or "", row.lease_epoch)
    guard = Guard(Execution, (row.execution_id,), row.revision, held)
    return msgspec.structs.replace(
        change(Upsert(Result(row.execution_id, b"R")), guards=[guard]), template=success_template(row)
    )


NO_PLAIN_ROW = (
    "local function set_row(s, write, revision, arguments)",
    "local function set_row(s, write, revision, arguments) error('interpreted')",
)
NO_PLAIN_CLAIM = (
    "local function claim_interpreted(s, key, form, parameters)",
    "local function claim_interpreted(s, key, form, parameters) error('interpreted')",
)
NO_PLAIN_TEMPLATE = (
    "    apply_template(s, guard[1], guard[2], get(s, guard[1], guard[2]), forms[form], {}, change[3])",
    "    error('interpreted')",
)


async def test_inserts_claims_and_ends_of_usual_rows_are_not_interpreted(vk: ValkeyStore, clock: ManualClock) -> None:
    async with opened(vk, clock, replaced(NO_PLAIN_ROW, NO_PLAIN_CLAIM, NO_PLAIN_TEMPLATE)) as store:
        rows = await alike(store)
        verdicts = await store.commit([completed(row) for row in rows])

        assert verdicts == [clock.now] * 5
    for row in rows:
        ended = await one(vk, Execution, row.execution_id)
        assert (ended.lifecycle_phase, ended.lease_id) == (LifecyclePhase.TERMINAL, row.lease_id)


async def test_ends_of_unlike_rows_are_interpreted(vk: ValkeyStore, clock: ManualClock) -> None:
    async with opened(vk, clock, replaced(NO_PLAIN_TEMPLATE)) as store:
        rows = await alike(store, 3)
        lease = LeaseRef(rows[0].execution_id, 0, rows[0].attempt_id or "", rows[0].lease_id or "", 1, 50)
        clock.advance_ms(5)
        assert await store.renew([lease], RENEWAL) == [clock.now + 50]
        with pytest.raises(Corruption, match="interpreted"):
            await store.commit([completed(row) for row in rows])
    assert await vk.commit([completed(row) for row in rows]) == [clock.now] * 3


async def test_a_renewal_that_shortens_one_lease_refuses_only_its_end(vk: ValkeyStore, clock: ManualClock) -> None:
    rows = await alike(vk)
    lease = LeaseRef(rows[0].execution_id, 0, rows[0].attempt_id or "", rows[0].lease_id or "", 1, 10)
    await vk.renew([lease], RENEWAL)
    clock.advance_ms(20)

    assert await vk.commit([completed(row) for row in rows]) == [None, *[clock.now] * 4]


async def test_expired_leases_of_alike_rows_are_refused(vk: ValkeyStore, clock: ManualClock) -> None:
    rows = await alike(vk)
    clock.advance_ms(1000)

    assert await vk.commit([completed(row) for row in rows]) == [None] * 5
    assert [await one(vk, Execution, row.execution_id) for row in rows] == rows


@pytest.mark.parametrize("field", ["lease_id", "attempt_id"])
async def test_a_row_that_another_process_claimed_is_fenced_among_alike_rows(
    vk: ValkeyStore, clock: ManualClock, field: str
) -> None:
    rows = await alike(vk)
    other = {field: "x" * len(getattr(rows[0], field))}
    assert await vk.commit([change(Patch(Execution, (rows[2].execution_id,), other), id=7)]) == [clock.now]

    now = clock.now
    assert await vk.commit([completed(row) for row in rows]) == [now, now, None, now, now]


async def test_an_id_that_a_row_has_twice_is_not_searched_for(vk: ValkeyStore) -> None:
    rows = await alike(vk)
    attempt_id = rows[0].attempt_id or ""
    for row in rows:
        namespace = attempt_id if row is rows[0] else "n" * len(attempt_id)
        fields = {"attempt_id": attempt_id, "namespace": namespace}
        assert await vk.commit([change(Patch(Execution, (row.execution_id,), fields))]) != [None]
    rows = [await one(vk, Execution, row.execution_id) for row in rows]

    assert None not in await vk.commit([completed(row) for row in rows])

    ended = [await one(vk, Execution, row.execution_id) for row in rows]
    assert [(row.namespace, row.attempt_id) for row in ended] == [(row.namespace, attempt_id) for row in rows]


async def test_a_write_of_an_earlier_change_of_the_call_stays(vk: ValkeyStore) -> None:
    rows = await alike(vk)
    tagged = change(Patch(Execution, (rows[3].execution_id,), {"tags": "earlier"}))

    assert None not in await vk.commit([tagged, *(completed(row) for row in rows)])

    ended = [await one(vk, Execution, row.execution_id) for row in rows]
    assert [row.tags for row in ended] == [None, None, None, "earlier", None]
    assert {row.lifecycle_phase for row in ended} == {LifecyclePhase.TERMINAL}


async def test_cells_of_a_later_release_survive_claim_and_end(vk: ValkeyStore, clock: ManualClock) -> None:
    table = VALKEY_TABLES[Execution]
    await alike(vk, 1)
    await vk.commit([change(Delete(Execution, (NAMES[0],)), Delete(Payload, (NAMES[0],)))])
    await vk.commit([change(Insert(queued(name)), Insert(payload(name))) for name in NAMES])
    for name in NAMES:
        text = table.key_text((name,), HOME)
        cells = msgspec.msgpack.decode(await vk.client.read(HOME, "HGET", f"{HOME}:exec_core", text))
        cells += [False] * (table.width - len(cells)) + ["later", 7]
        await vk.client.call(HOME, "HSET", f"{HOME}:exec_core", text, msgspec.msgpack.encode(cells))
    ids = tuple(LeaseIds(f"lease-{n:030}", f"attempt-{n:030}", 1000 + n) for n in range(6))
    rows = [row for row, _ in (await vk.claim_rows(ClaimRequest((MAIL,), ids, "w", "i", 1000, CLAIM))).rows]

    assert await vk.commit([completed(row) for row in rows]) == [clock.now] * 6
    for name in NAMES:
        text = table.key_text((name,), HOME)
        cells = msgspec.msgpack.decode(await vk.client.read(HOME, "HGET", f"{HOME}:exec_core", text))
        assert cells[table.width :] == ["later", 7]


async def test_rows_of_different_leases_and_keys_stay_apart(vk: ValkeyStore) -> None:
    rows = await alike(vk)

    assert [row.execution_id for row in rows] == NAMES[:5]
    assert len({row.lease_id for row in rows} | {row.attempt_id for row in rows}) == 10
    assert [row.revision for row in rows] == [1000, 1001, 1002, 1003, 1004]
    assert [await one(vk, Execution, row.execution_id) for row in rows] == rows
