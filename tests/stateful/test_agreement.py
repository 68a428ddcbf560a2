"""The agreement test: all stores execute the same sequences and return and store the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.port import Store
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.sqlite import SQLiteStore
from flowfabric.stores.valkey.address import parse_url
from flowfabric.stores.valkey.store import ValkeyStore
from flowfabric.testing.invariants import InvariantChecker
from tests.conftest import emptied, emptied_valkey
from tests.stateful import choices as some
from tests.stateful.operations import Lives
from tests.stateful.players import Call, Outcome, Player
from tests.stateful.state_machine import live, move, run_drawn_sequences

EVERY = 5  # steps between two full comparisons

READS = (
    "describe_execution",
    "read_execution_state",
    "read_state_vector",
    "get_execution_result",
    "read_execution_context",
    "read_current_attempt_index",
    "read_total_attempt_count",
    "get_execution_namespace",
    "attempt_history",
    "lease_history",
)


CORE = ("public_state", "lease_expires_at", "blocking_detail", "pending_retry_reason", "current_lane", "no_such_field")


class Agreement(Lives):
    """Several stores at once."""

    database: str
    player: type[Player] = Player

    def __init__(self) -> None:
        self._folder = TemporaryDirectory()
        self._steps = 0
        super().__init__()
        self._watch = InvariantChecker(self.players[0].engines[0])

    async def open(self) -> list[Player]:
        await emptied(self.database)
        stores: list[Store] = [
            MemoryStore(self.clock),
            SQLiteStore(Path(self._folder.name) / "ff.db", self.clock),
            PostgresStore(self.database, self.clock),
            ValkeyStore(parse_url(emptied_valkey()), self.clock),
        ]
        for store in stores:
            await store.open(migrate=True)
        players = [self.player(store, self.clock) for store in stores]
        for player in players:
            await player.begin()
        return players

    def ask(self, call: Call) -> Outcome:
        outcomes = self.run(self._ask(call))
        for player, outcome in zip(self.players, outcomes, strict=True):
            assert outcome.said == outcomes[0].said, f"{player.store.tag.title} differs in {call}"
        self._steps += 1
        if self._steps % EVERY == 0:
            self.run(self._compare())
        return outcomes[0]

    async def _ask(self, call: Call) -> list[Outcome]:
        outcomes = await asyncio.gather(*(player.play(call) for player in self.players))
        await self._same("executions", lambda player: player.execution_rows())
        return outcomes

    async def _compare(self) -> None:
        """Compare all rows and events."""
        await self._same("rows", lambda player: player.rows())
        await self._same("lines", lambda player: player.queued())
        await self._same("due", lambda player: player.due())
        await self._same("news", lambda player: player.news())
        await self._same("histories", lambda player: player.histories(self.known))
        await self._watch.check()

    async def _same(self, what: str, look: Callable[[Player], Any]) -> None:
        seen = await asyncio.gather(*(look(player) for player in self.players))
        for player, other in zip(self.players[1:], seen[1:], strict=True):
            assert other == seen[0], f"{what} differ between Memory and {player.store.tag.title}"

    @move(weight=2, worker=some.workers, limit=range(1, 4), offer=some.offers, ttl=some.ttls, seat=some.seats)
    def claim_from_lanes(self, worker: str, limit: int, offer: tuple[str, ...], ttl: int, seat: int) -> None:
        who = self.who(worker)
        self.do(
            "claim_from_lanes",
            seat=seat,
            lanes=some.LANES,
            limit=limit,
            **who,
            capabilities=offer,
            lease_ttl_ms=ttl,
        )

    # -- reads --------------------------------------------------------------------------------------------------------

    @move(pick=some.picks, verb=READS, seat=some.seats)
    def read(self, pick: int, verb: str, seat: int) -> None:
        self.do(verb, seat=seat, execution_id=self.pick(pick))

    @move(pick=some.picks, key=("a.b", "x.y", "Bad"), partition=(86, 86, 5), names=(("tags", "priority"), CORE))
    def read_parts(self, pick: int, key: str, partition: int, names: tuple[str, ...]) -> None:
        execution_id = self.pick(pick)
        self.do("get_execution_tag", execution_id=execution_id, key=key)
        self.do("read_exec_core_fields", partition=partition, execution_id=execution_id, names=names)
        self.do("await_end", execution_id=execution_id, max_wait_ms=0)

    @move(lane=some.lanes, cursor=(None, 0, 1, 9), limit=range(4), seat=some.seats)
    def read_lists(self, lane: str, cursor: int | None, limit: int, seat: int) -> None:
        after = None if cursor is None else self.pick(cursor)
        place = some.partition(lane)
        self.do("list_executions", seat=seat, partition=place, cursor=after, limit=limit)
        self.do("scan_eligible_executions", seat=seat, lane_id=lane, partition=place, limit=limit)
        behind = None if after is None else (self.clock.now - 100, after)
        self.do("list_expired_leases", seat=seat, as_of=self.clock.now, after=behind, limit=limit)
        self.do("list_expired_leases", seat=seat, as_of=self.clock.now, limit=limit, namespace="n1")
        self.do("list_lanes", seat=seat, limit=limit, cursor=lane if cursor else None)

    @move(
        lane=(None, *some.lanes),
        namespace=(None, *some.namespaces),
        state=(None, "waiting", "active", "completed", "delayed", "nonsense"),
        tag=(None, ("cairn.instance_id", "i1")),
        limit=range(4),
    )
    def search(
        self, lane: str | None, namespace: str | None, state: str | None, tag: tuple[str, str] | None, limit: int
    ) -> None:
        self.do("search_executions", lane_id=lane, namespace=namespace, public_state=state, tag=tag, limit=limit)

    @move(kid=("k1", "k2", "a:b", ""), secret=(some.SECRET, some.OTHER_SECRET, "zz"))
    def rotate_keys(self, kid: str, secret: str) -> None:
        self.do("rotate_waitpoint_hmac_secret_all", new_kid=kid, new_secret_hex=secret, grace_ms=1000)
        self.do("list_waitpoint_hmac_kids")

    def teardown(self) -> None:
        try:
            self.run(self._compare())
        finally:
            super().teardown()
            self._folder.cleanup()


@pytest.fixture
def table(own_database: str) -> type[Agreement]:
    """The state machine, with the database of this process."""
    return type("AgreementHere", (Agreement,), {"database": own_database})


@pytest.mark.timeout(600)
def test_every_store_answers_and_stores_the_same(table: type[Agreement]) -> None:
    run_drawn_sequences(table, examples=10, steps=40)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3))])
def test_a_long_sequence_is_the_same_on_every_store(table: type[Agreement], seed: int) -> None:
    live(table, seed, steps=150)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_long_sequences_are_the_same_on_every_store(table: type[Agreement]) -> None:
    for seed in range(1000, 1500):
        live(table, seed, steps=250)
