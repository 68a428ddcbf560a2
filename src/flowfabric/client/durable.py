"""Durable functions: remembered steps, gates, messages, votes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.api.encoding import read_handle
from flowfabric.client.base import execution_path
from flowfabric.client.decoding import read, variant
from flowfabric.client.leases import Working
from flowfabric.client.transport import segment, was_doubted
from flowfabric.engine.operations.durable import Link, OpenedGate, Parked, Waits
from flowfabric.engine.operations.signals import DEFAULT_PAGE, MAX_PAGE, WaitpointPage
from flowfabric.engine.types import (
    Accepted,
    Duplicate,
    GateArgs,
    Kids,
    MailArgs,
    ObservedSignal,
    Ready,
    SignalArgs,
    WaitpointRecord,
    WaitpointToken,
    WaitpointView,
    plain_condition,
)
from flowfabric.handles import Handle
from flowfabric.model.gate import GateMemo, StepMemo
from flowfabric.server.routes import durable, leases, signals

LEASE_GONE = frozenset({"stale_lease", "lease_expired", "lease_revoked", "execution_not_active"})


class Waiting(Working):
    """What a durable function does to remember and to wait."""

    async def record_step(
        self,
        handle: Handle,
        name: str,
        occurrence: int,
        result: bytes,
        *,
        encoding: str | None = None,
        digest: str | None = None,
    ) -> StepMemo:
        """Remember what a step returned; the first result stands."""
        told = await self._hold(
            "steps", handle, name=name, occurrence=occurrence, result_b64=result, encoding=encoding, digest=digest
        )
        return read(told, StepMemo)

    async def remembered_steps(self, handle: Handle) -> list[StepMemo]:
        """What the steps of the held execution returned."""
        told = await self.wire.ask("GET", execution_path(handle.fields.execution_id, "steps"))
        return read(told.body, durable.Steps).steps

    async def set_tags(self, handle: Handle, pairs: Mapping[str, str]) -> int:
        """Set some tags of the held execution, all of them or none; how many were given."""
        return read(await self._hold("tags", handle, tags=dict(pairs)), leases.TagsSet).set

    async def open_gate(self, handle: Handle, args: GateArgs) -> OpenedGate | GateMemo:
        """Open a gate by name, find it open with the same links, or find what came of it."""
        given = {name: getattr(args, name) for name in args.__struct_fields__}
        if args.condition is not None:
            given["condition"] = plain_condition(args.condition)
        opened = variant(await self._hold("gates", handle, **given), durable.OpenedGate, GateMemo)
        if isinstance(opened, GateMemo):
            return opened
        links = [Link(one.waitpoint_id, one.waitpoint_key, WaitpointToken(one.token)) for one in opened.links]
        return OpenedGate(opened.name, opened.gate, links)

    async def park(
        self, handle: Handle, gates: tuple[str, ...], *, reason_code: str = "waiting_for_signal"
    ) -> Parked | Ready:
        """Give the lease back until one of these gates closes; if one has, keep it."""
        try:
            told = await self._hold("park", handle, gates=gates, reason_code=reason_code)
        except errors.FabricError as refused:
            if was_doubted(refused) and refused.kind in LEASE_GONE:
                # Parked by the request whose answer got lost, or taken away: this attempt is over here in both cases.
                return Parked("", handle)
            raise
        answer = variant(told, Parked=durable.ParkedAway, Ready=durable.Ready)
        if isinstance(answer, durable.Ready):
            return Ready(tuple(answer.gates))
        return Parked(answer.suspension_id, read_handle(answer.handle))

    async def read_waits(self, execution_id: str) -> Waits:
        """What a function has waited for and still waits for."""
        return read((await self.wire.ask("GET", execution_path(execution_id, "waits"))).body, Waits)

    async def read_votes(self, memo: GateMemo) -> list[ObservedSignal]:
        """The signals that closed a gate."""
        told = await self.wire.ask("GET", execution_path(memo.execution_id, "gates", segment(memo.gate), "votes"))
        return [
            ObservedSignal(
                signal_id=one.signal_id,
                signal_name=one.signal_name,
                signal_category=one.signal_category,
                source_type=one.source_type,
                source_identity=one.source_identity,
                correlation_id=one.correlation_id,
                accepted_at=one.accepted_at,
                payload=one.payload_b64,
            )
            for one in read(told.body, durable.Votes).signals
        ]

    async def list_pending_waitpoints(
        self, execution_id: str, *, after: str | None = None, limit: int | None = None
    ) -> WaitpointPage:
        """The open waitpoints of an execution by id, without their tokens."""
        wanted = DEFAULT_PAGE if limit is None else limit
        query = {"after": after, "limit": wanted}
        told = await self.wire.ask("GET", execution_path(execution_id, "pending-waitpoints"), query=query)
        entries = [
            WaitpointView(
                waitpoint_id=one.waitpoint_id,
                waitpoint_key=one.waitpoint_key,
                state=one.state,
                required_signal_names=one.required_signal_names,
                created_at=one.created_at,
                activated_at=one.activated_at or None,
                expires_at=one.expires_at or None,
                execution_id=one.execution_id,
                token_kid=one.token_kid,
                token_fingerprint=one.token_fingerprint,
            )
            for one in read(told.body, list[signals.WaitpointEntry])
        ]
        return WaitpointPage(
            entries, entries[-1].waitpoint_id if len(entries) >= max(1, min(wanted, MAX_PAGE)) else None
        )

    async def describe_waitpoint(self, execution_id: str, waitpoint_id: str) -> WaitpointRecord | None:
        """A waitpoint of an execution, open or closed."""
        told = await self.wire.ask(
            "GET", execution_path(execution_id, "waitpoints", segment(waitpoint_id)), misses=True
        )
        return None if told.status == 404 else read(told.body, WaitpointRecord)

    async def read_token_of(self, execution_id: str, waitpoint_id: str) -> WaitpointToken | None:
        """The token of an open waitpoint, for those who may have it."""
        path = execution_path(execution_id, "waitpoints", segment(waitpoint_id), "token")
        told = await self.wire.ask("GET", path, misses=True)
        return None if told.status == 404 else WaitpointToken(read(told.body, signals.Token).token)

    async def list_waitpoint_hmac_kids(self) -> Kids:
        """Which keys sign and which still verify."""
        return read((await self.wire.ask("GET", "/v1/signing-keys")).body, Kids)

    # -- messages -------------------------------------------------------------------------------------------------

    async def send_message(self, args: MailArgs) -> Accepted | Duplicate:
        """Send a message to an execution, under the id that its sender minted."""
        body = _without(args, "execution_id", "payload") | {"payload_b64": args.payload}
        told = await self.wire.ask("POST", execution_path(args.execution_id, "messages"), body)
        sent: Accepted | Duplicate = variant(told.body, Accepted, Duplicate)
        return sent

    async def deliver_signal(self, args: SignalArgs) -> Accepted | Duplicate:
        """Send a signal to a waitpoint, with the token that allows it."""
        token = args.waitpoint_token
        body = _without(args, "payload", "waitpoint_token") | {
            "payload_b64": args.payload,
            "waitpoint_token": token.reveal() if isinstance(token, WaitpointToken) else token,
        }
        told = await self.wire.ask("POST", execution_path(args.execution_id, "signal"), body)
        sent: Accepted | Duplicate = variant(told.body, Accepted, Duplicate)
        return sent


def _without(args: msgspec.Struct, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in args.__struct_fields__ if name not in names}
