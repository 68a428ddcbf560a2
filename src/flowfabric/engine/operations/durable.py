"""The waits of a durable function, for the SDK: gates, mailboxes, children and remembered steps."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.runtime.after_commit import first
from flowfabric.engine.runtime.pending_rows import RootQueues
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.signing_keys import KEYSTORE, SigningKeys
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import suspension as validate_suspension
from flowfabric.handles import Handle, HandleKind
from flowfabric.model.execution import Execution
from flowfabric.model.gate import ChildCompletion, Gate, GateMemo, MailboxMessage, StepMemo, Vote
from flowfabric.model.signing_key import SigningKey
from flowfabric.model.suspension import IdempotencyRecord, Signal, Suspension, Waitpoint
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.durable import mailbox, steps
from flowfabric.rules.durable import park as park_rules
from flowfabric.rules.durable.gates import GateArgs, GateRows, OpenGate
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.durable.park import NeedsMessage
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.security import waitpoint_token as waitpoint_tokens
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension.signals import Accepted, DuplicateDelivery
from flowfabric.rules.suspension.state import ObservedSignal
from flowfabric.stores.queries import Read


class WaitpointLink(msgspec.Struct, frozen=True):
    """A waitpoint of a gate, and the token that lets its bearer vote."""

    waitpoint_id: str
    waitpoint_key: str
    token: waitpoint_tokens.WaitpointToken


class OpenedGate(msgspec.Struct, frozen=True):
    """A gate that nothing has closed yet."""

    name: str
    gate: Gate
    links: list[WaitpointLink]


class ParkResult(msgspec.Struct, frozen=True):
    """The execution waits for its gates; the lease is gone."""

    suspension_id: str
    handle: Handle


class Waits(msgspec.Struct, frozen=True):
    """What a function has waited for and still waits for."""

    open: dict[str, Gate]
    memos: dict[str, GateMemo]


class DurableOperations:
    """Operations of durable functions: gates, mailboxes and steps."""

    runtime: Runtime
    signing_keys: SigningKeys
    root_queues: RootQueues

    async def open_gate(self, handle: Handle, args: GateArgs) -> OpenedGate | GateMemo:
        """Open a gate by name, find it open with the same links, or find what came of it."""
        fields, ask = self.runtime.handle_fields(handle), validate_suspension.validate_gate(args)
        execution, fence = fields.execution_id, Fence.of(fields)
        seen: list[SigningKey] = []
        mail_seq = 0
        while True:
            wants = self._gate_wants(execution, ask, mail_seq)

            def decide(rows: list[list[Any]], now: int) -> Decision[OpenGate | GateMemo | NeedsMessage]:
                seen[:] = self.signing_keys.unseal_loaded_keys(rows[3])
                scene = GateRows(
                    row=first(rows[0]),
                    root=first(rows[1]),
                    memo=first(rows[4]),
                    mail=first(rows[5]),
                    ends=[end for found in rows[6:] for end in found if isinstance(end, ChildCompletion)],
                    keys=seen,
                    waitpoints={
                        one.waitpoint_id: one for some in rows[6:] for one in some if isinstance(one, Waitpoint)
                    },
                )
                return gate_rules.open_gate(scene, ask, fence, now)

            answer = await self.runtime.decide_and_commit(wants, decide)
            if isinstance(answer, NeedsMessage):
                mail_seq = answer.seq
            elif isinstance(answer, GateMemo):
                return answer
            else:
                return await self._linked(execution, answer, seen)

    def _gate_wants(self, execution: str, ask: GateArgs, mail_seq: int) -> tuple[Read, ...]:
        partition = ids.partition_of(ids.ExecutionId(execution))
        return (
            Read(Execution, (execution,)),
            Read(Suspension, (execution,)),
            *KEYSTORE,
            Read(GateMemo, (execution, ask.name)),
            Read(MailboxMessage, (execution, ask.mailbox or "", mail_seq)),
            *(Read(ChildCompletion, (execution, child)) for child in ask.children),
            *(Read(Waitpoint, (one, partition)) for one, _ in ask.waitpoints),
        )

    async def _linked(self, execution: str, opened: OpenGate, keys: list[SigningKey]) -> OpenedGate:
        """The gate with the tokens of its waitpoints; those of one that was there before are signed as they were."""
        kids, partition = opened.kids, ids.partition_of(ids.ExecutionId(execution))
        if len(kids) < len(opened.gate.waitpoints):
            found = await self.runtime.load([Read(Waitpoint, (one, partition)) for one, _ in opened.gate.waitpoints])
            kids = tuple(rows[0].token_kid if rows else "" for rows in found.rows)
        links = [
            WaitpointLink(
                one, key, waitpoint_tokens.WaitpointToken(waitpoint_tokens.remint_token(keys, kid, execution, one))
            )
            for (one, key), kid in zip(opened.gate.waitpoints, kids, strict=True)
        ]
        return OpenedGate(opened.name, opened.gate, links)

    async def park(
        self, handle: Handle, gates: tuple[str, ...], *, reason_code: str = "waiting_for_signal"
    ) -> ParkResult | park_rules.GatesReady:
        """Give the lease back until one of these gates closes; if one has, or its time is over, keep it."""
        fields = self.runtime.handle_fields(handle)
        names = validate_suspension.validate_names("gates", gates)
        reason = validation.text("reason_code", reason_code, limit=validation.MAX_NAME_BYTES)
        execution, suspension_id = fields.execution_id, self.runtime.minter.uuid()
        wants = (
            Read(Execution, (execution,)),
            Read(Suspension, (execution,)),
            *(Read(GateMemo, (execution, name)) for name in names),
        )

        def decide(rows: list[list[Any]], now: int) -> Decision[park_rules.ParkedExecution | park_rules.GatesReady]:
            memos = {found[0].gate: found[0] for found in rows[2:] if found}
            return park_rules.park(
                first(rows[0]),
                first(rows[1]),
                memos,
                names,
                suspension_id=suspension_id,
                reason_code=reason,
                fence=Fence.of(fields),
                holder=fields,
                now=now,
            )

        answer = await self.runtime.decide_and_commit(wants, decide)
        if isinstance(answer, park_rules.GatesReady):
            return answer
        return ParkResult(
            answer.suspension_id, Handle.mint(self.runtime.store.tag, HandleKind.SUSPENDED, answer.holder)
        )

    async def read_waits(self, execution_id: str) -> Waits:
        """The gates of an execution: those that are open, and what came of the others."""
        execution = validate.validate_execution_id(execution_id)
        loaded = await self.runtime.load((Read(Suspension, (execution,)), Read(GateMemo, (execution,))))
        return Waits(wait_state.open_gates(first(loaded.rows[0])), {memo.gate: memo for memo in loaded.rows[1]})

    async def read_votes(self, memo: GateMemo) -> list[ObservedSignal]:
        """The signals that closed a gate, in the order in which they were accepted."""
        if not isinstance(memo, GateMemo):
            raise errors.InvalidInput("memo: not a GateMemo")
        votes = [] if memo.votes is None else msgspec.json.decode(memo.votes, type=list[Vote])
        wants = [Read(Signal, (memo.execution_id, vote.member, vote.seq)) for vote in votes if vote.seq]
        loaded = await self.runtime.load(wants) if wants else None
        return [] if loaded is None else [wait_state.observed_signal(found[0]) for found in loaded.rows if found]

    async def send_message(self, args: MessageArgs) -> Accepted | DuplicateDelivery:
        """Send a message to an execution that has not ended; it is kept in order until somebody receives it."""
        ask = validate_suspension.validate_mail(args)
        key, call = wait_encoding.key_digest(ask.idempotency_key or ""), str(self.runtime.minter.change_id())
        wants = (
            Read(Execution, (ask.execution_id,)),
            Read(Suspension, (ask.execution_id,)),
            Read(IdempotencyRecord, (ask.execution_id, ask.scope, key)),
        )
        return await self.root_queues.decide_and_commit(
            ask.execution_id,
            wants,
            lambda rows, now: mailbox.send_message(first(rows[0]), first(rows[1]), first(rows[2]), ask, now, call=call),
        )

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
        """Remember what a step returned; if it was remembered before, the first result stands and is the answer."""
        fields = self.runtime.handle_fields(handle)
        memo = StepMemo(
            execution_id=fields.execution_id,
            name=validate_suspension.validate_name("name", name),
            occurrence=validation.integer("occurrence", occurrence, least=0),
            attempt_index=fields.attempt_index,
            recorded_at=0,
            result=validation.payload("result", result),
            encoding=validation.optional_text("encoding", encoding, limit=validation.MAX_NAME_BYTES),
            digest=validation.optional_text("digest", digest, limit=validation.MAX_NAME_BYTES),
        )
        key = (memo.execution_id, memo.name, memo.occurrence)
        seen = self.runtime._lease_cache.get(fields.execution_id)
        return await self.runtime.decide_and_commit(
            (Read(Execution, key[:1]), Read(StepMemo, key)),
            lambda rows, now: steps.record_step(first(rows[0]), first(rows[1]), memo, Fence.of(fields), now),
            assumed_rows=None if seen is None else [[seen], []],
        )

    async def read_steps(self, execution_id: str) -> list[StepMemo]:
        """What the steps of an execution returned, by name and occurrence."""
        return (await self.runtime.load((Read(StepMemo, (validate.validate_execution_id(execution_id),)),))).rows[0]

    async def read_steps_as_holder(self, handle: Handle) -> list[StepMemo]:
        """The same for whoever holds the execution: one that never had a step costs no trip."""
        fields = self.runtime.handle_fields(handle)
        seen = self.runtime._lease_cache.get(fields.execution_id)
        if seen is not None and seen.lease_id == fields.lease_id and not seen.has_steps:
            return []
        return await self.read_steps(fields.execution_id)
