"""Durable functions over HTTP: steps, gates, waitpoints, messages."""

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
from flowfabric.engine.operations.pages import WaitpointPage
from flowfabric.engine.operations.suspensions import DEFAULT_PAGE, MAX_PAGE
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
    """Operations of durable functions."""

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
        """Record the result of a step; if one is recorded, return that one."""
        response = await self._post_as_holder(
            "steps", handle, name=name, occurrence=occurrence, result_b64=result, encoding=encoding, digest=digest
        )
        return decode_as(response, StepMemo)

    async def read_steps(self, execution_id: str) -> list[StepMemo]:
        """Return the recorded steps of an execution, by name and occurrence."""
        response = await self.transport.request("GET", execution_path(execution_id, "steps"))
        return decode_as(response.body, durable.ReadStepsResponse).steps

    async def read_steps_as_holder(self, handle: Handle) -> list[StepMemo]:
        """Return the recorded steps of the held execution."""
        return await self.read_steps(handle.fields.execution_id)

    async def set_tags(self, handle: Handle, pairs: Mapping[str, str]) -> int:
        """Set tags of the held execution, all or none; return how many were given."""
        return decode_as(await self._post_as_holder("tags", handle, tags=dict(pairs)), executions.SetTagsResponse).set

    async def open_gate(self, handle: Handle, args: GateArgs) -> OpenedGate | GateMemo:
        """Open a gate by name, or return the open one with the same links, or the memo of a closed one."""
        fields = {name: getattr(args, name) for name in args.__struct_fields__}
        if args.condition is not None:
            fields["condition"] = plain_condition(args.condition)
        opened = decode_variant(
            await self._post_as_holder("gates", handle, **fields), durable.OpenGateResponse, GateMemo
        )
        if isinstance(opened, GateMemo):
            return opened
        links = [
            WaitpointLink(item.waitpoint_id, item.waitpoint_key, WaitpointToken(item.token)) for item in opened.links
        ]
        return OpenedGate(opened.name, opened.gate, links)

    async def park(
        self, handle: Handle, gates: tuple[str, ...], *, reason_code: str = "waiting_for_signal"
    ) -> ParkResult | GatesReady:
        """Release the lease until one of these gates closes; keep it if one is closed already."""
        try:
            response = await self._post_as_holder("park", handle, gates=gates, reason_code=reason_code)
        except errors.FabricError as refused:
            if may_be_repeat(refused) and refused.kind in LEASE_LOST_KINDS:
                # An earlier try parked, or the lease is gone: this attempt has ended here either way.
                return ParkResult("", handle)
            raise
        answer = decode_variant(response, Parked=durable.ParkedResponse, Ready=durable.GatesReadyResponse)
        if isinstance(answer, durable.GatesReadyResponse):
            return GatesReady(tuple(answer.gates))
        return ParkResult(answer.suspension_id, handle_from_text(answer.handle))

    async def read_waits(self, execution_id: str) -> Waits:
        """Return the open gates of a durable function and the memos of closed ones."""
        return decode_as((await self.transport.request("GET", execution_path(execution_id, "waits"))).body, Waits)

    async def read_votes(self, memo: GateMemo) -> list[ObservedSignal]:
        """Return the signals that closed a gate."""
        response = await self.transport.request(
            "GET", execution_path(memo.execution_id, "gates", quote_segment(memo.gate), "votes")
        )
        return [
            ObservedSignal(
                signal_id=item.signal_id,
                signal_name=item.signal_name,
                signal_category=item.signal_category,
                source_type=item.source_type,
                source_identity=item.source_identity,
                correlation_id=item.correlation_id,
                accepted_at=item.accepted_at,
                payload=item.payload_b64,
            )
            for item in decode_as(response.body, durable.ReadVotesResponse).signals
        ]

    async def list_pending_waitpoints(
        self, execution_id: str, *, after: str | None = None, limit: int | None = None
    ) -> WaitpointPage:
        """List the open waitpoints of an execution by id, without their tokens."""
        page_size = DEFAULT_PAGE if limit is None else limit
        query = {"after": after, "limit": page_size}
        response = await self.transport.request("GET", execution_path(execution_id, "pending-waitpoints"), query=query)
        entries = [
            WaitpointView(
                waitpoint_id=item.waitpoint_id,
                waitpoint_key=item.waitpoint_key,
                state=item.state,
                required_signal_names=item.required_signal_names,
                created_at=item.created_at,
                activated_at=item.activated_at or None,
                expires_at=item.expires_at or None,
                execution_id=item.execution_id,
                token_kid=item.token_kid,
                token_fingerprint=item.token_fingerprint,
            )
            for item in decode_as(response.body, list[signals.WaitpointEntry])
        ]
        return WaitpointPage(
            entries, entries[-1].waitpoint_id if len(entries) >= max(1, min(page_size, MAX_PAGE)) else None
        )

    async def describe_waitpoint(self, execution_id: str, waitpoint_id: str) -> WaitpointRecord | None:
        """Return a waitpoint of an execution, open or closed."""
        response = await self.transport.request(
            "GET", execution_path(execution_id, "waitpoints", quote_segment(waitpoint_id)), allow_not_found=True
        )
        return None if response.status == 404 else decode_as(response.body, WaitpointRecord)

    async def read_token_of(self, execution_id: str, waitpoint_id: str) -> WaitpointToken | None:
        """Return the token of an open waitpoint."""
        path = execution_path(execution_id, "waitpoints", quote_segment(waitpoint_id), "token")
        response = await self.transport.request("GET", path, allow_not_found=True)
        return (
            None
            if response.status == 404
            else WaitpointToken(decode_as(response.body, signals.WaitpointTokenResponse).token)
        )

    async def list_waitpoint_hmac_kids(self) -> KeyIds:
        """Return which keys sign waitpoint tokens and which still verify."""
        return decode_as((await self.transport.request("GET", "/v1/signing-keys")).body, KeyIds)

    # -- messages -------------------------------------------------------------------------------------------------

    async def send_message(self, args: MessageArgs) -> Accepted | DuplicateDelivery:
        """Send a message to the mailbox of an execution, under the id that the sender minted."""
        body = _fields_except(args, "execution_id", "payload") | {"payload_b64": args.payload}
        response = await self.transport.request("POST", execution_path(args.execution_id, "messages"), body)
        sent: Accepted | DuplicateDelivery = decode_variant(response.body, Accepted, DuplicateDelivery)
        return sent

    async def deliver_signal(self, args: SignalArgs) -> Accepted | DuplicateDelivery:
        """Deliver a signal to a waitpoint; the token is required."""
        token = args.waitpoint_token
        body = _fields_except(args, "payload", "waitpoint_token") | {
            "payload_b64": args.payload,
            "waitpoint_token": token.reveal() if isinstance(token, WaitpointToken) else token,
        }
        response = await self.transport.request("POST", execution_path(args.execution_id, "signal"), body)
        sent: Accepted | DuplicateDelivery = decode_variant(response.body, Accepted, DuplicateDelivery)
        return sent


def _fields_except(args: msgspec.Struct, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in args.__struct_fields__ if name not in names}
