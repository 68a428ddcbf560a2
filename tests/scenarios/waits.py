"""Words for scenarios about waiting: W is a worker with a live lease on an execution, k1 the key that signs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from flowfabric.cursors import FROM_THE_START
from flowfabric.engine.operations.suspensions import ConditionAlreadySatisfied, SuspendDetails, Suspended
from flowfabric.ids import ExecutionId, partition_of
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.condition import AllConditions, ByName, Condition, Count, CountKind, Single, Wildcard
from flowfabric.rules.feed import SignalFeedEntry
from flowfabric.rules.security.waitpoint_token import WaitpointToken
from flowfabric.rules.suspension.arguments import FreshWaitpoint, SuspendArgs, UsePendingWaitpoint, WaitpointBinding
from flowfabric.rules.suspension.signals import Accepted, DuplicateDelivery, SignalArgs
from flowfabric.rules.suspension.waitpoints import PendingWaitpoint, WaitpointRecord
from tests.scenarios.play import Play

SUSPENDED = "suspended/unowned/not_applicable/{reason}/none/attempt_interrupted/suspended"
SATISFIED = "resume_condition_satisfied"
APPENDED = "appended_to_waitpoint"
REPEATED = "appended_to_waitpoint_duplicate"
NO_OP = "no_op"
BUFFERED = "buffered_for_pending_waitpoint"
NO_TIMEOUT = 9_999_999_999_999


def named(*names: str, key: str = "k") -> Condition:
    """One leaf for each name on one waitpoint, all of them wanted."""
    leaves = tuple(Single(key, ByName(name)) for name in names)
    return leaves[0] if len(leaves) == 1 else AllConditions(leaves)


def count(n: int, kind: CountKind = CountKind.DISTINCT_SOURCES, *keys: str) -> Count:
    """So many different satisfiers."""
    return Count(n, kind, keys or ("k",))


ANY = Single("k", Wildcard())


class Waits:
    """What scenarios about waiting do with an engine."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.engine = play.engine

    def id(self) -> str:
        """A fresh id."""
        return self.engine.minter.uuid()

    def args(self, condition: Condition = ANY, *bindings: WaitpointBinding, **given: Any) -> SuspendArgs:
        """The arguments of a suspend; without bindings, one fresh waitpoint with key `k`."""
        fields: dict[str, Any] = {
            "suspension_id": self.id(),
            "waitpoints": bindings or (FreshWaitpoint(self.id(), "k"),),
            "resume_condition": condition,
            "reason_code": "waiting_for_signal",
            "now": self.play.now,
        }
        return SuspendArgs(**(fields | given))

    async def suspend(
        self, held: Claimed, condition: Condition = ANY, *bindings: WaitpointBinding, **given: Any
    ) -> SuspendDetails:
        """The holder suspends, and it is suspended then."""
        outcome = await self.engine.suspend(held.handle, self.args(condition, *bindings, **given))
        assert isinstance(outcome, Suspended)
        return outcome.details

    async def suspended(
        self, condition: Condition = ANY, *bindings: WaitpointBinding, **given: Any
    ) -> tuple[Claimed, Any]:
        """A new execution that waits; what its worker held, and the details."""
        held = await self.play.claimed()
        return held, await self.suspend(held, condition, *bindings, **given)

    async def on_pending(
        self, held: Claimed, pending: PendingWaitpoint, condition: Condition, **given: Any
    ) -> Suspended | ConditionAlreadySatisfied:
        """The holder suspends on a waitpoint that it made before."""
        return await self.engine.suspend(
            held.handle, self.args(condition, UsePendingWaitpoint(pending.waitpoint_id), **given)
        )

    def signal(
        self, e: str, name: str, waitpoint_id: str, token: WaitpointToken | str, source: str = "ana", **given: Any
    ) -> SignalArgs:
        """A signal."""
        fields: dict[str, Any] = {
            "execution_id": e,
            "waitpoint_id": waitpoint_id,
            "signal_id": self.id(),
            "signal_name": name,
            "signal_category": "test",
            "source_type": "user",
            "source_identity": source,
            "waitpoint_token": token if isinstance(token, WaitpointToken) else WaitpointToken(token),
        }
        return SignalArgs(**(fields | given))

    async def send(self, e: str, name: str, to: Any, source: str = "ana", **given: Any) -> Accepted | DuplicateDelivery:
        """Signal a waitpoint with its own token."""
        token = to.token if isinstance(to, PendingWaitpoint) else to.waitpoint_token
        return await self.engine.deliver_signal(self.signal(e, name, to.waitpoint_id, token, source, **given))

    async def effect(self, e: str, name: str, to: Any, source: str = "ana", **given: Any) -> str:
        """What a signal that is accepted does."""
        accepted = await self.send(e, name, to, source, **given)
        assert isinstance(accepted, Accepted)
        return accepted.effect

    async def record(self, e: str, waitpoint_id: str) -> WaitpointRecord:
        """A waitpoint as it is kept."""
        found = await self.engine.describe_waitpoint(e, waitpoint_id)
        assert found is not None
        return found

    async def signals_told(self, *executions: str) -> list[SignalFeedEntry]:
        """The signal feed from its start."""
        feed = await self.engine.subscribe_signal_delivery(FROM_THE_START)
        found = []
        while (news := await feed.next(timeout_s=0)) is not None:
            found.append(news)
        return [news for news in found if not executions or news.execution_id in executions]

    async def failed_check(self, e: str) -> int | None:
        """When a token was refused last."""
        row = await self.play.sheet(e)
        return row.last_hmac_validation_failed_at

    async def time_out(self, to: int) -> None:
        """The deadline passes and the sweep comes by."""
        self.play.clock.now = to
        await self.engine.sweep_once("suspension_timeout")


async def until(condition: Callable[[], bool]) -> None:
    """Let others work until this is so."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for is somebody else's doing, without an event
            await asyncio.sleep(0.001)


def partition(e: str) -> int:
    return partition_of(ExecutionId(e))


def plain(value: Any) -> str:
    """What printing or encoding a record gives away."""
    return f"{value!r} {value} {msgspec.json.encode(value, enc_hook=repr)!r}"
