"""Rules and engine compared with the oracle: thousands of random steps, each answer and each record predicted."""

from __future__ import annotations

import random
from itertools import groupby
from typing import Any
from unittest.mock import ANY

import pytest

from flowfabric.cursors import FROM_THE_START
from flowfabric.model.event import Topic
from flowfabric.model.execution import Execution, Payload
from flowfabric.rules.execution.views import core_fields
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.testing.flaky_store import FlakyStore
from flowfabric.testing.invariants import InvariantChecker, scan_all
from tests.stateful.execution_model import Life
from tests.stateful.operations import Lives
from tests.stateful.oracle import Oracle
from tests.stateful.players import Call, Outcome, Player
from tests.stateful.state_machine import live, run_drawn_sequences

# What the specification leaves open while it does not matter, and what belongs to other areas.
IGNORED = {"execution_id", "execution_kind", "creator_identity", "lease_acquired_at"}


class BesideTheOracle(Lives):
    """One engine in memory, and the oracle."""

    def __init__(self) -> None:
        super().__init__()
        self.oracle = Oracle(self.clock)
        self._watch = InvariantChecker(self.players[0].engines[0])
        self._told: dict[str, list[tuple[Any, ...]]] = {}
        self._read_to = 0
        self._compared: dict[str, tuple[Execution, dict[str, Any]]] = {}
        self._feeds = self.run(self._subscribe())

    async def open(self) -> list[Player]:
        return [Player(MemoryStore(self.clock), self.clock)]

    async def _subscribe(self) -> list[Any]:
        engine = self.players[0].engines[0]
        return [
            await engine.subscribe_completion(FROM_THE_START),
            await engine.subscribe_operator_event(FROM_THE_START),
            await engine.subscribe_lease_history(FROM_THE_START),
        ]

    def claimer(self, instance: str) -> int:
        """Claim through one engine only: when another one learns of new queues is not specified."""
        return 0

    def ask(self, call: Call) -> Outcome:
        call = Call(call.verb, call.given)
        outcome, marked = self.run(self._play(call))
        expected = self.heard(call, self.oracle.answer(call, outcome.said, marked))
        assert agrees(expected, outcome.said), f"{call}\n  expected {expected}\n  answered {outcome.said}"
        self.run(self._compare(call))
        return outcome

    def heard(self, call: Call, expected: Any) -> Any:
        """Return the permitted forms of an answer."""
        return expected

    async def _play(self, call: Call) -> tuple[Outcome, set[str]]:
        outcome = await self.players[0].play(call)
        page = await self.players[0].store.feed(Topic.LEASE, self._read_to, 1000)
        self._read_to = page.position
        return outcome, {found.event.execution_id for found in page.events if found.event.lease == "expired"}

    async def _compare(self, call: Call) -> None:
        store = self.players[0].store
        rows = await scan_all(store, Execution)
        payloads = {payload.execution_id: payload for payload in await scan_all(store, Payload)}
        assert {row.execution_id for row in rows} == self.oracle.lives.keys(), call
        for row in rows:
            life = self.oracle.lives[row.execution_id]
            core = life.core()
            if self._compared.get(row.execution_id) == (row, core):
                continue  # Neither side has changed since they were found to agree.
            known = core_fields(row, payloads[row.execution_id])
            record = {name: value for name, value in known.items() if name not in IGNORED}
            assert record == core, f"{call}: {row.execution_id}"
            await self._compare_cold(life)
            self._compared[row.execution_id] = (row, core)
        await self._compare_feeds(call)
        await self._watch.check()

    async def _compare_cold(self, life: Life) -> None:
        engine = self.players[0].engines[0]
        assert await engine.get_execution_result(life.execution_id) == life.result
        context = await engine.read_execution_context(life.execution_id)
        assert (context.input_payload, context.tags) == (life.payload or b"", life.tags)
        attempts = self.players[0].plain(await engine.attempt_history(life.execution_id))
        assert len(attempts) == len(life.attempts)
        for seen, expected in zip(attempts, life.attempts, strict=True):
            lineage = {name: value for name, value in seen["lineage"].items() if value is not None and name != "is"}
            assert lineage == {name: value for name, value in expected["lineage"].items() if value is not None}
            assert seen["attempt_state"] == expected["state"]
            assert {name: seen[name] for name in expected if name not in ("lineage", "state")} == {
                name: value for name, value in expected.items() if name not in ("lineage", "state")
            }
        history = [
            (entry.event, entry.ts, entry.fields.get("lease_epoch") or entry.fields.get("new_lease_epoch"))
            for entry in await engine.lease_history(life.execution_id)
        ]
        assert history == [event[:3] for event in life.history if event[0] != "renewed"]

    async def _compare_feeds(self, call: Call) -> None:
        """Compare each feed, as a subscriber receives it, with the events of the oracle."""
        completions, operators, leases = self._feeds
        heard: list[tuple[Any, ...]] = []
        while news := await completions.next(timeout_s=0):
            heard.append(("completion", news.execution_id, news.at, news.outcome, news.namespace, news.instance_tag))
        while news := await operators.next(timeout_s=0):
            heard.append(("operator", news.execution_id, news.at, news.event_type, news.details))
        emitted, self.oracle.emitted = self.oracle.emitted, []
        assert sorted(heard, key=repr) == sorted(emitted, key=repr) or _same(heard, emitted), call
        while news := await leases.next(timeout_s=0):
            self._told.setdefault(news.execution_id, []).append((news.variant, news.at, news.revoked_by))
        for life in self.oracle.lives.values():
            expected = once([entry for entry in map(_feed_entry, life.history) if entry])
            told_here = once(self._told.get(life.execution_id, []))
            assert told_here[len(told_here) - len(expected) :] == expected, call


class OnAFlakyWire(BesideTheOracle):
    """The same over a network that loses requests and replies: no caller may notice."""

    async def open(self) -> list[Player]:
        self.wire = FlakyStore(MemoryStore(self.clock), rng=random.Random(4), rate=0.1)
        return [Player(self.wire, self.clock)]

    def heard(self, call: Call, expected: Any) -> Any:
        """A deleted row does not show who deleted it, so an answer about that may claim less."""
        if call.verb == "purge_execution":
            return ANY
        if call.given.get("name") == "retention_trimmer":
            return {**expected, "processed": ANY}
        return expected

    def teardown(self) -> None:
        super().teardown()
        assert self.wire.losses


def _same(heard: list[tuple[Any, ...]], emitted: list[tuple[Any, ...]]) -> bool:
    """Return True for the same entries in any order; the oracle may leave a part open."""
    left = list(emitted)
    for entry in heard:
        match = next((one for one in left if one == entry), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def once(entries: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return entries in order; a renewal may be repeated, so two at one instant equal one."""
    return [entry for entry, _ in groupby(entries)]


def _feed_entry(entry: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the lease feed's form of a history entry (5.5)."""
    event, at, _, why, by = entry
    match event:
        case "acquired" | "renewed" | "expired" | "reclaimed":
            return event.capitalize(), at, None
        case "revoked":
            return "Revoked", at, "operator"
        case "released" if why.startswith("expired:"):
            return "Expired", at, None
        case "released":
            return "Revoked", at, by
        case _:
            return None


def agrees(expected: Any, said: Any) -> bool:
    """Return True if an answer is the expected one; of a refusal, compare the parts that the specification names."""
    match expected:
        case {"refused": _}:
            return isinstance(said, dict) and all(said.get(name) == value for name, value in expected.items())
        case list():
            return isinstance(said, list) and len(said) == len(expected) and all(map(agrees, expected, said))
        case _:
            return bool(expected == said)


def predict(*, examples: int, steps: int) -> None:
    run_drawn_sequences(BesideTheOracle, examples=examples, steps=steps)


@pytest.mark.timeout(600)
def test_every_answer_and_every_record_agrees_with_the_oracle() -> None:
    predict(examples=25, steps=40)


@pytest.mark.parametrize("seed", range(12))
def test_a_long_sequence_agrees_with_the_oracle(seed: int) -> None:
    live(BesideTheOracle, seed, steps=400)


@pytest.mark.parametrize("seed", range(4))
def test_lost_requests_and_replies_change_nothing_observable(seed: int) -> None:
    live(OnAFlakyWire, seed, steps=300)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_long_sequences_agree_with_the_oracle() -> None:
    for seed in range(1000, 4000):
        live(BesideTheOracle if seed % 4 else OnAFlakyWire, seed, steps=250)
