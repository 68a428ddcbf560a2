"""Durable functions over HTTP: steps, gates, waitpoints, messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowfabric import errors
from flowfabric.api import durable, executions, signals
from flowfabric.api.encoding import MAX_WAIT_MS, handle_from_text
from flowfabric.client.base import execution_path, fields_except
from flowfabric.client.decoding import convert_variant, decode_as, decode_variant
from flowfabric.client.executions import encode_create
from flowfabric.client.leases import ClientLeases
from flowfabric.client.transport import may_be_repeat, quote_segment
from flowfabric.engine.durable.facts import FactReading
from flowfabric.engine.durable.held_runs import MAX_HELD
from flowfabric.engine.operations.durable import OpenedGate, ParkResult, Remembered, StepRecorder, WaitpointLink, Waits
from flowfabric.engine.operations.pages import WaitpointPage
from flowfabric.engine.operations.suspensions import DEFAULT_PAGE, MAX_PAGE
from flowfabric.engine.types import (
    BATCH_MAILBOX,
    Accepted,
    CreateExecution,
    DuplicateDelivery,
    FactArgs,
    GateArgs,
    GatesClosed,
    GatesReady,
    KeyIds,
    LeftOperation,
    MemoArgs,
    MessageArgs,
    ObservedSignal,
    ReplyArgs,
    SignalArgs,
    WaitpointRecord,
    WaitpointToken,
    WaitpointView,
    plain_condition,
)
from flowfabric.handles import Handle
from flowfabric.model.answers import execution as answers
from flowfabric.model.gate import Fact, GateMemo, MailboxMessage, Reply, StepMemo, StepState
from flowfabric.model.view import view_of

LEASE_LOST_KINDS = frozenset({"stale_lease", "lease_expired", "lease_revoked", "execution_not_active"})


class ClientDurable(ClientLeases):
    """Operations of durable functions."""

    record_step = StepRecorder.record_step

    async def _record_step(self, handle: Handle, args: MemoArgs, state: StepState) -> StepMemo:
        return decode_as(await self._post_as_holder("steps", handle, **_memo_fields(args), state=state), StepMemo)

    async def remembered(self, handle: Handle) -> Remembered:
        """Return what earlier attempts of the held execution left behind."""
        return decode_as(await self._post_as_holder("remembered", handle), Remembered)

    async def leave_gates(
        self, handle: Handle, operations: Sequence[LeftOperation], *, memo: MemoArgs | None = None
    ) -> StepMemo | None:
        fields = None if memo is None else _memo_fields(memo)
        response = await self._post_as_holder("leave-gates", handle, operations=list(operations), memo=fields)
        return decode_as(response, durable.LeaveGatesResponse).memo

    async def spawn(
        self, handle: Handle, asks: Sequence[CreateExecution], memos: Sequence[MemoArgs]
    ) -> list[answers.Created | answers.Duplicate]:
        if len(asks) != len(memos):
            raise errors.InvalidInput(f"memos: {len(memos)} for {len(asks)} children")
        children = [
            {"execution": encode_create(ask), "memo": _memo_fields(memo)} for ask, memo in zip(asks, memos, strict=True)
        ]
        response = decode_as(await self._post_as_holder("spawn", handle, children=children), durable.SpawnResponse)
        return [convert_variant(item, answers.Created, answers.Duplicate) for item in response.results]

    async def read_batch(self, handle: Handle) -> list[MailboxMessage]:
        response = decode_as(await self._post_as_holder("batch", handle), durable.ReadBatchResponse)
        execution = handle.fields.execution_id
        return [
            MailboxMessage(execution, BATCH_MAILBOX, one.seq, one.message_id, 0, "", one.payload, one.payload_encoding)
            for one in response.inputs
        ]

    async def continue_as_new(
        self, handle: Handle, input_payload: bytes, *, encoding: str | None = None, unmet: Sequence[str] = ()
    ) -> answers.Continued:
        """Release the lease and begin the run's next life with another input, with nothing remembered."""
        response = await self._post_as_holder(
            "continue-as-new", handle, input_payload_b64=input_payload, encoding=encoding, unmet=unmet
        )
        return decode_as(response, answers.Continued)

    async def read_steps(self, execution_id: str) -> list[StepMemo]:
        path = execution_path(execution_id, "steps")
        return (await self.transport.fetch(durable.ReadStepsResponse, "GET", path)).steps

    async def set_tags(self, handle: Handle, pairs: Mapping[str, str]) -> int:
        return decode_as(await self._post_as_holder("tags", handle, tags=dict(pairs)), executions.SetTagsResponse).set

    async def open_gate(self, handle: Handle, args: GateArgs) -> OpenedGate | GateMemo:
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

    async def open_gates_and_park(
        self,
        handle: Handle,
        gates: tuple[GateArgs, ...],
        *,
        names: tuple[str, ...] = (),
        reason_code: str = "waiting_for_signal",
    ) -> ParkResult | GatesClosed:
        new = _new_gates(gates)
        try:
            response = await self._post_as_holder(
                "open-and-park", handle, gates=new, names=names, reason_code=reason_code
            )
        except errors.FabricError as refused:
            if may_be_repeat(refused) and refused.kind in LEASE_LOST_KINDS:
                return ParkResult("", handle)  # as in `park`
            raise
        answer = decode_variant(response, Parked=durable.ParkedResponse, Closed=durable.GatesClosedResponse)
        if isinstance(answer, durable.GatesClosedResponse):
            return GatesClosed(answer.memos)
        return ParkResult(answer.suspension_id, handle_from_text(answer.handle))

    async def open_gates(self, handle: Handle, gates: tuple[GateArgs, ...]) -> GatesClosed:
        response = await self._post_as_holder("open-gates", handle, gates=_new_gates(gates))
        return GatesClosed(decode_as(response, durable.GatesClosedResponse).memos)

    async def record_patch(self, handle: Handle, patch: str, *, is_new: bool, number: int | None = None) -> StepMemo:
        return decode_as(
            await self._post_as_holder("patch", handle, patch=patch, is_new=is_new, number=number), StepMemo
        )

    async def release_held(
        self, execution_id: str, *, accept: bool = False, version: str | None = None, sender: str = ""
    ) -> bool:
        path, body = execution_path(execution_id, "release"), {"accept": accept, "version": version, "sender": sender}
        return (await self.transport.fetch(durable.ReleaseHeldResponse, "POST", path, body)).released

    async def list_held(self, tasks: Sequence[str], *, namespace: str = "default", limit: int = MAX_HELD) -> list[str]:
        body = {"tasks": list(tasks), "namespace": namespace, "limit": limit}
        return (await self.transport.fetch(durable.ListHeldResponse, "POST", "/v1/held", body)).execution_ids

    async def pin_version(self, handle: Handle, version: str, *, number: int | None = None) -> StepMemo:
        return decode_as(await self._post_as_holder("pin", handle, version=version, number=number), StepMemo)

    async def unpin(self, execution_id: str, *, version: str | None = None) -> bool:
        path, body = execution_path(execution_id, "unpin"), {"version": version}
        return (await self.transport.fetch(durable.UnpinResponse, "POST", path, body)).unpinned

    async def read_waits(self, execution_id: str) -> Waits:
        return await self.transport.fetch(Waits, "GET", execution_path(execution_id, "waits"))

    async def read_votes(self, memo: GateMemo) -> list[ObservedSignal]:
        path = execution_path(memo.execution_id, "gates", quote_segment(memo.gate), "votes")
        answer = await self.transport.fetch(durable.ReadVotesResponse, "GET", path)
        return [view_of(ObservedSignal, item, payload=item.payload_b64) for item in answer.signals]

    async def list_pending_waitpoints(
        self, execution_id: str, *, after: str | None = None, limit: int | None = None
    ) -> WaitpointPage:
        page_size = DEFAULT_PAGE if limit is None else limit
        query = {"after": after, "limit": page_size}
        path = execution_path(execution_id, "pending-waitpoints")
        entries = [
            view_of(WaitpointView, item, activated_at=item.activated_at or None, expires_at=item.expires_at or None)
            for item in await self.transport.fetch(list[signals.WaitpointEntry], "GET", path, query=query)
        ]
        return WaitpointPage(
            entries, entries[-1].waitpoint_id if len(entries) >= max(1, min(page_size, MAX_PAGE)) else None
        )

    async def describe_waitpoint(self, execution_id: str, waitpoint_id: str) -> WaitpointRecord | None:
        path = execution_path(execution_id, "waitpoints", quote_segment(waitpoint_id))
        return await self.transport.find(WaitpointRecord, path)

    async def read_token_of(self, execution_id: str, waitpoint_id: str) -> WaitpointToken | None:
        path = execution_path(execution_id, "waitpoints", quote_segment(waitpoint_id), "token")
        found = await self.transport.find(signals.WaitpointTokenResponse, path)
        return None if found is None else WaitpointToken(found.token)

    async def list_waitpoint_hmac_kids(self) -> KeyIds:
        return await self.transport.fetch(KeyIds, "GET", "/v1/signing-keys")

    # -- messages -------------------------------------------------------------------------------------------------

    async def send_message(self, args: MessageArgs) -> Accepted | DuplicateDelivery:
        body = fields_except(args, "execution_id", "payload", "wants_reply") | {"payload_b64": args.payload}
        response = await self.transport.request("POST", execution_path(args.execution_id, "messages"), body)
        return decode_variant(response.body, Accepted, DuplicateDelivery)

    async def ask(self, args: MessageArgs, *, max_wait_ms: int = 0) -> Reply:
        wait_ms = min(max_wait_ms, MAX_WAIT_MS)
        body = fields_except(args, "execution_id", "payload", "dedup_ttl_ms", "wants_reply")
        body |= {"payload_b64": args.payload, "wait_ms": wait_ms}
        path = execution_path(args.execution_id, "asks")
        return await self.transport.fetch(Reply, "POST", path, body, wait_ms=wait_ms)

    async def reply(self, handle: Handle, args: ReplyArgs, memo: MemoArgs) -> Reply:
        fields = fields_except(args, "payload") | {"payload_b64": args.payload, "memo": _memo_fields(memo)}
        return decode_as(await self._post_as_holder("reply", handle, **fields), Reply)

    async def close_inbox(self, handle: Handle, memo: MemoArgs) -> bool:
        response = await self._post_as_holder("close-inbox", handle, memo=_memo_fields(memo))
        return decode_as(response, durable.CloseInboxResponse).closed

    async def read_reply(self, execution_id: str, message_id: str, *, max_wait_ms: int = 0) -> Reply:
        wait_ms = min(max_wait_ms, MAX_WAIT_MS)
        path, query = execution_path(execution_id, "asks", message_id), {"wait_ms": wait_ms}
        return await self.transport.fetch(Reply, "GET", path, query=query, wait_ms=wait_ms)

    # -- facts ----------------------------------------------------------------------------------------------------

    async def set_fact(self, handle: Handle, args: FactArgs) -> Fact:
        fields = fields_except(args, "value") | {"value_b64": args.value}
        return decode_as(await self._post_as_holder("facts", handle, **fields), Fact)

    async def read_fact(self, execution_id: str, name: str, *, after: int = 0, max_wait_ms: int = 0) -> FactReading:
        wait_ms = min(max_wait_ms, MAX_WAIT_MS)
        path, query = execution_path(execution_id, "facts", quote_segment(name)), {"after": after, "wait_ms": wait_ms}
        return await self.transport.fetch(FactReading, "GET", path, query=query, wait_ms=wait_ms)

    async def list_facts(self, execution_id: str) -> list[Fact]:
        path = execution_path(execution_id, "facts")
        return (await self.transport.fetch(durable.ListFactsResponse, "GET", path)).facts

    async def deliver_signal(self, args: SignalArgs) -> Accepted | DuplicateDelivery:
        token = args.waitpoint_token
        body = fields_except(args, "payload", "waitpoint_token") | {
            "payload_b64": args.payload,
            "waitpoint_token": token.reveal() if isinstance(token, WaitpointToken) else token,
        }
        response = await self.transport.request("POST", execution_path(args.execution_id, "signal"), body)
        return decode_variant(response.body, Accepted, DuplicateDelivery)


def _memo_fields(memo: MemoArgs) -> dict[str, Any]:
    return fields_except(memo, "result") | {"result_b64": memo.result}


def _new_gates(gates: tuple[GateArgs, ...]) -> list[dict[str, Any]]:
    if linked := next((gate.name for gate in gates if gate.waitpoints), None):
        raise errors.InvalidInput(f"gate {linked}: it has links; open it first")
    return [fields_except(gate, "condition", "waitpoints") for gate in gates]
