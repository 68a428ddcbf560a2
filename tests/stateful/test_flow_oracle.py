"""Random flows compared with the flow oracle: late edges, parked and replayed members, passed results."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.handles import Handle
from flowfabric.ids import SeededMinter
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from flowfabric.testing.flow_invariants import check_flow_invariants
from tests.scenarios.flow_env import FlowEnv
from tests.stateful.flow_oracle import Edge, FlowOracle, Join, Member

SEEDS = {"memory": 12, "sqlite": 2, "postgres": 1, "valkey": 1}
STEPS = 45
NAMES = "abcdefghij"
KINDS = ("success_only", "success_only", "success_only", "failure_only", "any_outcome")
MOVES = {"add": 8, "policy": 3, "edge": 10, "finish": 6, "claim": 4, "release": 5, "park": 2, "stop": 3, "replay": 4}
LATE_MOVES = MOVES | {"tell": 6, "find": 3, "end_siblings": 2}


class Game:
    """One flow on an engine, and its oracle."""

    def __init__(self, store: Store, clock: ManualClock, seed: int, *, lively: bool) -> None:
        self.chance = random.Random(seed)
        self.lively = lively
        engine = Engine(store, minter=SeededMinter(seed), settings=Settings(dispatch=lively))
        self.flow = FlowEnv(engine, clock)
        self.oracle = FlowOracle()
        self.held: dict[str, Handle] = {}
        self.log: list[str] = []

    async def play(self) -> None:
        await self.flow.begin()
        moves = self.chance.choices([*MOVES], [*MOVES.values()], k=STEPS)
        for move in moves:
            self.flow.clock.advance_ms(1)
            self.oracle.now += 1
            before = await self._ends()
            if (what := await getattr(self, move)()) is None:
                continue
            self.log.append(f"{move} {what}")
            self.oracle.dispatch_all()
            await self._carry_on(before)
            if move in ("edge", "replay"):
                before = await self._ends()
                self.oracle.reconcile()
                self.oracle.dispatch_all()
                await self.flow.sweep("dependency_reconciler")
                await self._carry_on(before)
            await self.compare()

    async def _ends(self) -> dict[str, str]:
        return {name: (await self.flow.row(name)).terminal_outcome.value for name in self.oracle.members}

    async def _carry_on(self, before: dict[str, str]) -> None:
        """Dispatch all outcomes and cancel siblings."""
        if self.lively:
            await self.flow.engine.dispatcher.wait_idle()
            return
        while True:
            now = await self._ends()
            await self.flow.cascade(*(name for name in now if now[name] not in ("none", before.get(name))))
            before = await self._ends()
            if await self.flow.sweep("edge_cancel_dispatcher") == [0]:
                return

    async def compare(self) -> None:
        seen, expected = dict[str, Any](), dict[str, Any]()
        for name, member in self.oracle.members.items():
            row = await self.flow.row(name)
            payload = await self.payload(name)
            seen[name] = (row.public_state.value, row.attempt_state.value, payload)
            expected[name] = (member.state, member.attempt, None if payload is None else member.payload)
        for name, join in self.oracle.joins.items():
            if join.n:
                seen[f"join {name}"], expected[f"join {name}"] = await self.flow.counts(name), str(join)
        assert seen == expected, "\n".join(self.log[-8:])

    async def payload(self, name: str) -> bytes | None:
        return await self.flow.payload(name)

    def pick(self, wanted: Callable[[Member], bool]) -> str | None:
        found = [name for name, member in self.oracle.members.items() if wanted(member)]
        return self.chance.choice(found) if found else None

    # -- moves; None if there is nothing to do ----------------------------------------------------------------------

    async def add(self) -> str | None:
        name = NAMES[len(self.oracle.members) :][:1]
        if not name:
            return None
        await self.flow.add(name, input_payload=b"orig")
        self.oracle.members[name] = Member(b"orig")
        return name

    async def policy(self) -> str | None:
        name = self.pick(lambda member: True)
        if name is None:
            return None
        # Whether a sibling is cancelled or skipped first is chance if both happen concurrently.
        then = self.chance.choice(("let_run", "let_run" if self.lively else "cancel_remaining"))
        policy: dict[str, Any] = {"kind": self.chance.choice(("all_of", "any_of", "quorum")), "on_satisfied": then}
        if policy["kind"] == "quorum":
            policy["k"] = self.chance.randint(1, 4)
        if policy["kind"] == "all_of":
            del policy["on_satisfied"]
        if self.oracle.join(name).staged:
            with pytest.raises(errors.InvalidInput, match="edge_group_policy_already_fixed"):
                await self.flow.set_policy(name, policy)
            return None
        await self.flow.set_policy(name, policy)
        self.oracle.joins[name] = Join(**policy)
        return f"{name} {policy}"

    async def edge(self) -> str | None:
        if len(self.oracle.members) < 2:
            return None
        upstream, downstream = sorted(self.chance.sample(sorted(self.oracle.members), 2))
        edge = Edge(upstream, downstream, self.chance.choice(KINDS), passes=self.chance.random() < 0.5)
        ref = "r" if edge.passes else None
        edge_id = await self.flow.stage(upstream, downstream, dependency_kind=edge.kind, data_passing_ref=ref)
        self.oracle.join(downstream).staged += 1
        if self.chance.random() < 0.9:
            await self.flow.apply(upstream, downstream)
            self.oracle.apply(edge_id, edge)
        return f"{upstream}->{downstream} {edge.kind} {ref}"

    async def claim(self) -> str | None:
        name = self.pick(lambda member: member.state == "waiting")
        if name is not None:
            self.held[name] = (await self.flow.claim(name)).handle
            self.oracle.claim(name)
        return name

    async def finish(self) -> str | None:
        name = await self.claim()
        return None if name is None else await self._end(name)

    async def release(self) -> str | None:
        name = self.pick(lambda member: member.state == "active")
        return None if name is None else await self._end(name)

    async def _end(self, name: str) -> str:
        if self.chance.random() < 0.6:
            result = self.chance.choice((None, b"", f"{name}{len(self.log)}".encode()))
            await self.flow.engine.complete(self.held[name], result=result)
            self.oracle.end(name, "completed", result)
            return f"{name} {result!r}"
        await self.flow.engine.fail(self.held[name], reason="broken")
        self.oracle.end(name, "failed")
        return f"{name} failed"

    async def park(self) -> str | None:
        name = self.pick(lambda member: member.state == "active")
        if name is not None:
            await self.flow.engine.wait_children(self.held[name])
            self.oracle.park(name)
        return name

    async def stop(self) -> str | None:
        name = self.pick(lambda member: not member.is_over)
        if name is None:
            return None
        if self.chance.random() < 0.7:
            await self.flow.cancel(name)
            self.oracle.end(name, "cancelled")
        else:
            await self.flow.engine.expire_execution(self.flow.names[name])
            self.oracle.end(name, "expired")
        return f"{name} {self.oracle.members[name].state}"

    async def replay(self) -> str | None:
        name = self.pick(lambda member: member.is_over and member.replays < 10)
        if name is not None:
            answer = await self.flow.engine.replay_execution(self.flow.names[name])
            self.oracle.replay(name)
            assert answer.public_state == self.oracle.members[name].state
        return name


class LateGame(Game):
    """The same without background dispatch: dispatching, finding and following up outcomes are moves like others."""

    def __init__(self, store: Store, clock: ManualClock, seed: int, *, few: int) -> None:
        super().__init__(store, clock, seed, lively=False)
        # outcomes with many edges are dispatched by edge, not in order of arrival
        self.in_order = few > len(NAMES) ** 2

    async def play(self) -> None:
        await self.flow.begin()
        for move in self.chance.choices([*LATE_MOVES], [*LATE_MOVES.values()], k=2 * STEPS):
            self.flow.clock.advance_ms(1)
            self.oracle.now += 1
            if (what := await getattr(self, move)()) is not None:
                self.log.append(f"{move} {what}")
                await self.compare()
        await check_flow_invariants(self.flow.engine)

    async def tell(self) -> str | None:
        name = self.pick(lambda member: True)
        if name is not None:
            self.oracle.dispatch(name)
            await self.flow.cascade(name)
        return name

    async def find(self) -> str:
        self.oracle.reconcile()
        name = self.chance.choice(("dependency_reconciler", "completion_dispatch"))
        await self.flow.sweep(name)
        return name

    async def end_siblings(self) -> str:
        self.oracle.cancel_siblings()
        await self.flow.sweep("edge_cancel_dispatcher")
        return ""

    async def payload(self, name: str) -> bytes | None:
        return await super().payload(name) if self.in_order else None


@pytest.mark.parametrize("few", [128, 1])
async def test_late_flows_agree_with_the_oracle(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr("flowfabric.rules.flow.successors.MAX_NAMED_SUCCESSORS", few)
    for seed in range(SEEDS[store.tag.title.lower()]):
        await LateGame(store, clock, 5000 + 1000 * few + seed, few=few).play()


@pytest.mark.parametrize("few", [128, 1])
@pytest.mark.parametrize("lively", [False, True])
async def test_flows_agree_with_the_oracle(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, lively: bool, few: int
) -> None:
    monkeypatch.setattr("flowfabric.rules.flow.successors.MAX_NAMED_SUCCESSORS", few)
    for seed in range(SEEDS[store.tag.title.lower()]):
        game = Game(store, clock, 1000 * few + 2 * seed + lively, lively=lively)
        await game.play()
        await game.flow.engine.dispatcher.close()
