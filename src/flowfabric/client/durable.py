"""Durable functions: remembered steps, gates, messages, votes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.api import durable, executions, signals
from flowfabric.api.encoding import handle_from_text
from flowfabric.client.base import execution_path
from flowfabric.client.decoding import decode_as, decode_variant
from flowfabric.client.leases import ClientLeases
from flowfabric.client.transport import may_be_repeat, quote_segment
from flowfabric.engine.operations.durable import OpenedGate, ParkResult, WaitpointLink, Waits
from flowfabric.engine.operations.signals import DEFAULT_PAGE, MAX_PAGE, WaitpointPage
from flowfabric.engine.types import (
    Accepted,
    DuplicateDelivery,
    GateArgs,
    GatesReady,
    KeyIds,
    MessageArgs,
    ObservedSignal,
    SignalArgs,
    WaitpointRecord,
    WaitpointToken,
    WaitpointView,
    plain_condition,
)
from flowfabric.handles import Handle
from flowfabric.model.gate import GateMemo, StepMemo

LEASE_LOST_KINDS = frozenset({"stale_lease", "lease_expired", "lease_revoked", "execution_not_active"})


class ClientDurable(ClientLeases):
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
        told = await self._post_as_holder(
            "steps", handle, name=name, occurrence=occurrence, result_b64=result, encoding=encoding, digest=digest
        )
        return decode_as(told, StepMemo)

    async def read_steps_as_holder(self, handle: Handle) -> list[StepMemo]:
        """What the steps of the held execution returned."""
        told = await self.transport.request("GET", execution_path(handle.fields.execution_id, "steps"))
        return decode_as(told.body, durable.ReadStepsResponse).steps

    async def set_tags(self, handle: Handle, pairs: Mapping[str, str]) -> int:
        """Set some tags of the held execution, all of them or none; how many were given."""
        return decode_as(await self._post_as_holder("tags", handle, tags=dict(pairs)), executions.SetTagsResponse).set

    async def open_gate(self, handle: Handle, args: GateArgs) -> OpenedGate | GateMemo:
        """Open a gate by name, find it open with the same links, or find what came of it."""
        given = {name: getattr(args, name) for name in args.__struct_fields__}
        if args.condition is not None:
            given["condition"] = plain_condition(args.condition)
        opened = decode_variant(
            await self._post_as_holder("gates", handle, **given), durable.OpenGateResponse, GateMemo
        )
        if isinstance(opened, GateMemo):
            return opened
        links = [WaitpointLink(one.waitpoint_id, one.waitpoint_key, WaitpointToken(one.token)) for one in opened.links]
        return OpenedGate(opened.name, opened.gate, links)

    async def park(
        self, handle: Handle, gates: tuple[str, ...], *, reason_code: str = "waiting_for_signal"
    ) -> ParkResult | GatesReady:
        """Give the lease back until one of these gates closes; if one has, keep it."""
        try:
            told = await self._post_as_holder("park", handle, gates=gates, reason_code=reason_code)
        except errors.FabricError as refused:
            if may_be_repeat(refused) and refused.kind in LEASE_LOST_KINDS:
                # Parked by the request whose answer got lost, or taken away: this attempt is over here in both cases.
                return ParkResult("", handle)
            raise
        answer = decode_variant(told, Parked=durable.ParkedResponse, Ready=durable.GatesReadyResponse)
        if isinstance(answer, durable.GatesReadyResponse):
            return GatesReady(tuple(answer.gates))
        return ParkResult(answer.suspension_id, handle_from_text(answer.handle))

    async def read_waits(self, execution_id: str) -> Waits:
        """What a function has waited for and still waits for."""
        return decode_as((await self.transport.request("GET", execution_path(execution_id, "waits"))).body, Waits)

    async def read_votes(self, memo: GateMemo) -> list[ObservedSignal]:
        """The signals that closed a gate."""
        told = await self.transport.request(
            "GET", execution_path(memo.execution_id, "gates", quote_segment(memo.gate), "votes")
        )
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
            for one in decode_as(told.body, durable.ReadVotesResponse).signals
        ]

    async def list_pending_waitpoints(
        self, execution_id: str, *, after: str | None = None, limit: int | None = None
    ) -> WaitpointPage:
        """The open waitpoints of an execution by id, without their tokens."""
        wanted = DEFAULT_PAGE if limit is None else limit
        query = {"after": after, "limit": wanted}
        told = await self.transport.request("GET", execution_path(execution_id, "pending-waitpoints"), query=query)
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
            for one in decode_as(told.body, list[signals.WaitpointEntry])
        ]
        return WaitpointPage(
            entries, entries[-1].waitpoint_id if len(entries) >= max(1, min(wanted, MAX_PAGE)) else None
        )

    async def describe_waitpoint(self, execution_id: str, waitpoint_id: str) -> WaitpointRecord | None:
        """A waitpoint of an execution, open or closed."""
        told = await self.transport.request(
            "GET", execution_path(execution_id, "waitpoints", quote_segment(waitpoint_id)), allow_not_found=True
        )
        return None if told.status == 404 else decode_as(told.body, WaitpointRecord)

    async def read_token_of(self, execution_id: str, waitpoint_id: str) -> WaitpointToken | None:
        """The token of an open waitpoint, for those who may have it."""
        path = execution_path(execution_id, "waitpoints", quote_segment(waitpoint_id), "token")
        told = await self.transport.request("GET", path, allow_not_found=True)
        return (
            None if told.status == 404 else WaitpointToken(decode_as(told.body, signals.WaitpointTokenResponse).token)
        )

    async def list_waitpoint_hmac_kids(self) -> KeyIds:
        """Which keys sign and which still verify."""
        return decode_as((await self.transport.request("GET", "/v1/signing-keys")).body, KeyIds)

    # -- messages -------------------------------------------------------------------------------------------------

    async def send_message(self, args: MessageArgs) -> Accepted | DuplicateDelivery:
        """Send a message to an execution, under the id that its sender minted."""
        body = _without(args, "execution_id", "payload") | {"payload_b64": args.payload}
        told = await self.transport.request("POST", execution_path(args.execution_id, "messages"), body)
        sent: Accepted | DuplicateDelivery = decode_variant(told.body, Accepted, DuplicateDelivery)
        return sent

    async def deliver_signal(self, args: SignalArgs) -> Accepted | DuplicateDelivery:
        """Send a signal to a waitpoint, with the token that allows it."""
        token = args.waitpoint_token
        body = _without(args, "payload", "waitpoint_token") | {
            "payload_b64": args.payload,
            "waitpoint_token": token.reveal() if isinstance(token, WaitpointToken) else token,
        }
        told = await self.transport.request("POST", execution_path(args.execution_id, "signal"), body)
        sent: Accepted | DuplicateDelivery = decode_variant(told.body, Accepted, DuplicateDelivery)
        return sent


def _without(args: msgspec.Struct, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in args.__struct_fields__ if name not in names}
