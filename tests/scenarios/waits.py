"""Suspensions, waitpoints and signals: the operations that scenarios about waiting repeat."""

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
from tests.scenarios.env import Env

SUSPENDED = "suspended/unowned/not_applicable/{reason}/none/attempt_interrupted/suspended"
SATISFIED = "resume_condition_satisfied"
APPENDED = "appended_to_waitpoint"
REPEATED = "appended_to_waitpoint_duplicate"
NO_OP = "no_op"
BUFFERED = "buffered_for_pending_waitpoint"
NO_TIMEOUT = 9_999_999_999_999


def named(*names: str, key: str = "k") -> Condition:
    """Return a condition that requires a signal of each name on one waitpoint."""
    leaves = tuple(Single(key, ByName(name)) for name in names)
    return leaves[0] if len(leaves) == 1 else AllConditions(leaves)


def count(n: int, kind: CountKind = CountKind.DISTINCT_SOURCES, *keys: str) -> Count:
    """Return a condition that requires `n` distinct satisfiers."""
    return Count(n, kind, keys or ("k",))


ANY = Single("k", Wildcard())


class Waits:
    """Suspends executions and signals them."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self.engine = env.engine

    def new_id(self) -> str:
        """Return a new id."""
        return self.engine.minter.uuid()

    def args(self, condition: Condition = ANY, *bindings: WaitpointBinding, **options: Any) -> SuspendArgs:
        """Return the arguments of a suspend; without bindings, one fresh waitpoint with key `k`."""
        fields: dict[str, Any] = {
            "suspension_id": self.new_id(),
            "waitpoints": bindings or (FreshWaitpoint(self.new_id(), "k"),),
            "resume_condition": condition,
            "reason_code": "waiting_for_signal",
            "now": self.env.now,
        }
        return SuspendArgs(**(fields | options))

    async def suspend(
        self, claim: Claimed, condition: Condition = ANY, *bindings: WaitpointBinding, **options: Any
    ) -> SuspendDetails:
        """Suspend a claimed execution and return the details."""
        outcome = await self.engine.suspend(claim.handle, self.args(condition, *bindings, **options))
        assert isinstance(outcome, Suspended)
        return outcome.details

    async def create_suspended(
        self, condition: Condition = ANY, *bindings: WaitpointBinding, **options: Any
    ) -> tuple[Claimed, Any]:
        """Create, claim and suspend an execution; return its claim and the details."""
        claim = await self.env.create_and_claim()
        return claim, await self.suspend(claim, condition, *bindings, **options)

    async def create_pending(self, key: str, expires_in_ms: int) -> tuple[Claimed, PendingWaitpoint]:
        """Create and claim an execution and create a pending waitpoint for it."""
        claim = await self.env.create_and_claim()
        return claim, await self.engine.create_waitpoint(claim.handle, key, expires_in_ms)

    async def suspend_on_pending(
        self, claim: Claimed, pending: PendingWaitpoint, condition: Condition, **options: Any
    ) -> Suspended | ConditionAlreadySatisfied:
        """Suspend a claimed execution on a pending waitpoint."""
        return await self.engine.suspend(
            claim.handle, self.args(condition, UsePendingWaitpoint(pending.waitpoint_id), **options)
        )

    def signal_args(
        self, e: str, name: str, waitpoint_id: str, token: WaitpointToken | str, source: str = "ana", **options: Any
    ) -> SignalArgs:
        """Return the arguments of a signal."""
        fields: dict[str, Any] = {
            "execution_id": e,
            "waitpoint_id": waitpoint_id,
            "signal_id": self.new_id(),
            "signal_name": name,
            "signal_category": "test",
            "source_type": "user",
            "source_identity": source,
            "waitpoint_token": token if isinstance(token, WaitpointToken) else WaitpointToken(token),
        }
        return SignalArgs(**(fields | options))

    async def send(
        self, e: str, name: str, to: Any, source: str = "ana", **options: Any
    ) -> Accepted | DuplicateDelivery:
        """Signal a waitpoint with its own token."""
        token = to.token if isinstance(to, PendingWaitpoint) else to.waitpoint_token
        return await self.engine.deliver_signal(self.signal_args(e, name, to.waitpoint_id, token, source, **options))

    async def effect(self, e: str, name: str, to: Any, source: str = "ana", **options: Any) -> str:
        """Signal a waitpoint, assert that the signal is accepted, and return its effect."""
        accepted = await self.send(e, name, to, source, **options)
        assert isinstance(accepted, Accepted)
        return accepted.effect

    async def record(self, e: str, waitpoint_id: str) -> WaitpointRecord:
        """Read a waitpoint."""
        found = await self.engine.describe_waitpoint(e, waitpoint_id)
        assert found is not None
        return found

    async def signal_events(self, *executions: str) -> list[SignalFeedEntry]:
        """Read the signal feed from its start."""
        feed = await self.engine.subscribe_signal_delivery(FROM_THE_START)
        found = []
        while (event := await feed.next(timeout_s=0)) is not None:
            found.append(event)
        return [event for event in found if not executions or event.execution_id in executions]

    async def token_refused_at(self, e: str) -> int | None:
        """Return when a token was last refused."""
        row = await self.env.row(e)
        return row.last_hmac_validation_failed_at

    async def time_out(self, to: int) -> None:
        """Advance the clock and run the sweep for suspension timeouts."""
        self.env.clock.now = to
        await self.engine.sweep_once("suspension_timeout")


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the condition has no event to wait for
            await asyncio.sleep(0.001)


def partition(e: str) -> int:
    return partition_of(ExecutionId(e))


def printed_form(value: Any) -> str:
    """Return every printed and encoded form of a record."""
    return f"{value!r} {value} {msgspec.json.encode(value, enc_hook=repr)!r}"
