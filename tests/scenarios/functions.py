"""Words for scenarios about durable functions: what one opens, parks on and receives, as the engine sees it."""

from __future__ import annotations

from typing import Any

from flowfabric.engine.operations.durable import OpenedGate, ParkResult
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.condition import Condition, Count, CountKind
from flowfabric.model.gate import GateKind, GateMemo
from flowfabric.rules.durable.gates import GateArgs
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.durable.park import GatesReady
from flowfabric.rules.suspension.signals import Accepted, DuplicateDelivery
from tests.scenarios.play import Play
from tests.scenarios.waits import SUSPENDED, Waits

WAITS = SUSPENDED.format(reason="waiting_for_signal")
HOUR = 3_600_000


def all_of(*keys: str) -> Condition:
    return Count(len(keys), CountKind.DISTINCT_WAITPOINTS, keys)


class Function:
    """A durable function, as far as the engine sees it."""

    def __init__(self, play: Play, waits: Waits, e: str, held: Claimed | None = None) -> None:
        self.play, self.waits, self.e = play, waits, e
        self.engine = play.engine
        self._held = held

    @property
    def held(self) -> Claimed:
        """What its worker holds."""
        assert self._held is not None
        return self._held

    @held.setter
    def held(self, held: Claimed) -> None:
        self._held = held

    async def approval(self, name: str = "approve", *keys: str, **given: Any) -> OpenedGate | GateMemo:
        keys = keys or ("ana", "bo")
        pairs = tuple((self.waits.id(), key) for key in keys)
        args = GateArgs(name=name, kind=GateKind.SIGNALS, condition=all_of(*keys), waitpoints=pairs, **given)
        return await self.engine.open_gate(self.held.handle, args)

    async def receive(self, name: str, mailbox: str = "steer", **given: Any) -> OpenedGate | GateMemo:
        args = GateArgs(name=name, kind=GateKind.MAILBOX, mailbox=mailbox, **given)
        return await self.engine.open_gate(self.held.handle, args)

    async def timer(self, name: str, length: int) -> OpenedGate | GateMemo:
        return await self.engine.open_gate(
            self.held.handle, GateArgs(name=name, kind=GateKind.TIMER, expires_in_ms=length)
        )

    async def children(self, name: str, *children: str, **given: Any) -> OpenedGate | GateMemo:
        args = GateArgs(name=name, kind=GateKind.CHILDREN, children=children, **given)
        return await self.engine.open_gate(self.held.handle, args)

    async def park(self, *names: str) -> ParkResult | GatesReady:
        return await self.engine.park(self.held.handle, names)

    async def vote(self, gate: OpenedGate, key: str, **given: Any) -> str:
        [link] = [link for link in gate.links if link.waitpoint_key == key]
        signal = self.waits.signal(self.e, "vote", link.waitpoint_id, link.token, source=key, **given)
        accepted = await self.engine.deliver_signal(signal)
        assert isinstance(accepted, Accepted)
        return accepted.effect

    async def send(self, text: bytes, mailbox: str = "steer", **given: Any) -> Accepted | DuplicateDelivery:
        fields: dict[str, Any] = {"execution_id": self.e, "mailbox": mailbox, "message_id": self.waits.id()}
        return await self.engine.send_message(MessageArgs(**(fields | {"payload": text} | given)))

    async def go_on(self, worker: str = "wb") -> None:
        self.held = await self.play.resumed(self.e, worker)

    async def killed(self, worker: str = "wb") -> None:
        await self.play.expired(self.held)
        self.held = await self.play.reclaimed(self.e, worker)

    async def memo(self, name: str) -> GateMemo:
        return (await self.engine.read_waits(self.e)).memos[name]

    async def child(self) -> Claimed:
        """A running child, on the partition of its parent."""
        e = await self.play.create(parent_id=self.e)
        return await self.play.claimed_again(e, "wc")


def opened(gate: OpenedGate | GateMemo) -> OpenedGate:
    assert isinstance(gate, OpenedGate)
    return gate


def closed(gate: OpenedGate | GateMemo) -> GateMemo:
    assert isinstance(gate, GateMemo)
    return gate
