"""A durable function as the engine sees it: gates, messages, steps and children."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.engine.operations.durable import OpenedGate, ParkResult
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.change import Change, Delete
from flowfabric.model.condition import Condition, Count, CountKind
from flowfabric.model.execution import Execution, Payload, Result
from flowfabric.model.gate import GateKind, GateMemo
from flowfabric.rules.durable.gates import GateArgs
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.durable.park import GatesReady
from flowfabric.rules.suspension.signals import Accepted, DuplicateDelivery
from tests.scenarios.env import Env
from tests.scenarios.waits import SUSPENDED, Waits

WAITS = SUSPENDED.format(reason="waiting_for_signal")
HOUR = 3_600_000


def all_of(*keys: str) -> Condition:
    return Count(len(keys), CountKind.DISTINCT_WAITPOINTS, keys)


class DurableFunction:
    """One durable function and the claim of its worker."""

    def __init__(self, env: Env, waits: Waits, e: str, claim: Claimed | None = None) -> None:
        self.env, self.waits, self.e = env, waits, e
        self.engine = env.engine
        self._claim = claim

    def complete_before_the_next_commit(self, child: Claimed, monkeypatch: pytest.MonkeyPatch) -> None:
        """Commit the next decision only after the child completed and was delivered."""
        queue = self.engine.runtime.commit_queue
        add = queue.add

        def add_after_the_end(change: Change) -> asyncio.Future[int | None]:
            monkeypatch.setattr(queue, "add", add)

            async def write() -> int | None:
                await self.engine.complete(child.handle)
                await self.engine.child_completions.drain()
                return await add(change)

            return asyncio.ensure_future(write())

        monkeypatch.setattr(queue, "add", add_after_the_end)

    @property
    def claim(self) -> Claimed:
        """The claim of its worker."""
        assert self._claim is not None
        return self._claim

    @claim.setter
    def claim(self, claim: Claimed) -> None:
        self._claim = claim

    async def approval(self, name: str = "approve", *keys: str, **options: Any) -> OpenedGate | GateMemo:
        keys = keys or ("ana", "bo")
        pairs = tuple((self.waits.new_id(), key) for key in keys)
        args = GateArgs(name=name, kind=GateKind.SIGNALS, condition=all_of(*keys), waitpoints=pairs, **options)
        return await self.engine.open_gate(self.claim.handle, args)

    async def receive(self, name: str, mailbox: str = "steer", **options: Any) -> OpenedGate | GateMemo:
        args = GateArgs(name=name, kind=GateKind.MAILBOX, mailbox=mailbox, **options)
        return await self.engine.open_gate(self.claim.handle, args)

    async def timer(self, name: str, length: int) -> OpenedGate | GateMemo:
        return await self.engine.open_gate(
            self.claim.handle, GateArgs(name=name, kind=GateKind.TIMER, expires_in_ms=length)
        )

    async def children(self, name: str, *children: str, **options: Any) -> OpenedGate | GateMemo:
        args = GateArgs(name=name, kind=GateKind.CHILDREN, children=children, **options)
        return await self.engine.open_gate(self.claim.handle, args)

    async def park(self, *names: str) -> ParkResult | GatesReady:
        return await self.engine.park(self.claim.handle, names)

    async def vote(self, gate: OpenedGate, key: str, **options: Any) -> str:
        [link] = [link for link in gate.links if link.waitpoint_key == key]
        signal = self.waits.signal_args(self.e, "vote", link.waitpoint_id, link.token, source=key, **options)
        accepted = await self.engine.deliver_signal(signal)
        assert isinstance(accepted, Accepted)
        return accepted.effect

    async def send(self, text: bytes, mailbox: str = "steer", **options: Any) -> Accepted | DuplicateDelivery:
        fields: dict[str, Any] = {"execution_id": self.e, "mailbox": mailbox, "message_id": self.waits.new_id()}
        return await self.engine.send_message(MessageArgs(**(fields | {"payload": text} | options)))

    async def resume(self, worker: str = "wb") -> None:
        self.claim = await self.env.grant_and_resume(self.e, worker)

    async def reclaim(self, worker: str = "wb") -> None:
        await self.env.expire_lease(self.claim)
        self.claim = await self.env.grant_and_reclaim(self.e, worker)

    async def memo(self, name: str) -> GateMemo:
        return (await self.engine.read_waits(self.e)).memos[name]

    async def complete_child(self, child: Claimed, result: bytes | None = None) -> None:
        """Complete a child and wait until its completion reaches the parent."""
        await self.engine.complete(child.handle, result=result)
        await self.engine.child_completions.drain()

    async def create_child(self) -> Claimed:
        """Create and claim a child on the partition of its parent."""
        e = await self.env.create(parent_id=self.e)
        return await self.env.grant_and_claim(e, "wc")

    async def delete(self, e: str) -> None:
        """Delete an execution as a purge does, whatever its state."""
        runtime = self.engine.runtime
        deletes = tuple(Delete(kind, (e,)) for kind in (Result, Payload, Execution))
        assert await runtime.commit_queue.add(Change((), deletes, id=runtime.minter.change_id())) is not None


def opened(gate: OpenedGate | GateMemo) -> OpenedGate:
    assert isinstance(gate, OpenedGate)
    return gate


def closed(gate: OpenedGate | GateMemo) -> GateMemo:
    assert isinstance(gate, GateMemo)
    return gate
