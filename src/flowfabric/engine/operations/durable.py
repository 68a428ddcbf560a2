"""Operations of durable functions: gates, mailboxes, children and recorded steps."""

from __future__ import annotations

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.pending_rows import RootQueues
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.signing_keys import SigningKeys
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import suspension as validate_suspension
from flowfabric.handles import Handle, HandleFields, HandleKind
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
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.security import waitpoint_token as waitpoint_tokens
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension.signals import Accepted, DuplicateDelivery
from flowfabric.rules.suspension.state import ObservedSignal


class WaitpointLink(msgspec.Struct, frozen=True):
    """A waitpoint of a gate, and the token that authorizes a vote."""

    waitpoint_id: str
    waitpoint_key: str
    token: waitpoint_tokens.WaitpointToken


class OpenedGate(msgspec.Struct, frozen=True):
    """An open gate and the links of its waitpoints."""

    name: str
    gate: Gate
    links: list[WaitpointLink]


class ParkResult(msgspec.Struct, frozen=True):
    """The execution is parked on its gates, and its lease is released."""

    suspension_id: str
    handle: Handle


class Waits(msgspec.Struct, frozen=True):
    """The open gates of a function, and the memos of the closed ones."""

    open: dict[str, Gate]
    memos: dict[str, GateMemo]


class DurableOperations:
    """Operations of durable functions."""

    runtime: Runtime
    signing_keys: SigningKeys
    root_queues: RootQueues

    async def open_gate(self, handle: Handle, args: GateArgs) -> OpenedGate | GateMemo:
        """Open a gate by name; return it as it is if it is open already, and its memo if it has closed."""
        fields, ask = self.runtime.handle_fields(handle), validate_suspension.validate_gate(args)
        keys: list[SigningKey] = []
        answer = await self._open_gate(fields, ask, 0, keys)
        while isinstance(answer, NeedsMessage):
            answer = await self._open_gate(fields, ask, answer.seq, keys)
        return answer if isinstance(answer, GateMemo) else await self._with_links(fields.execution_id, answer, keys)

    async def _open_gate(
        self, fields: HandleFields, ask: GateArgs, message_seq: int, keys: list[SigningKey]
    ) -> OpenGate | GateMemo | NeedsMessage:
        """Decide on a gate with this message of its mailbox loaded; `keys` receives the signing keys."""
        reads, execution = ReadSet(), fields.execution_id
        partition = ids.partition_of(ids.ExecutionId(execution))
        row, root = reads.one(Execution, execution), reads.one(Suspension, execution)
        key_rows, memo = reads.many(SigningKey, 0), reads.one(GateMemo, execution, ask.name)
        message = reads.one(MailboxMessage, execution, ask.mailbox or "", message_seq)
        completions = [reads.many(ChildCompletion, execution, child) for child in ask.children]
        waitpoints = reads.each(Waitpoint, ((waitpoint, partition) for waitpoint, _ in ask.waitpoints))

        def decide(rows: Rows, now: int) -> Decision[OpenGate | GateMemo | NeedsMessage]:
            keys[:] = self.signing_keys.unseal_loaded_keys(key_rows(rows))
            gate_rows = GateRows(
                row=row(rows),
                root=root(rows),
                memo=memo(rows),
                mail=message(rows),
                ends=[completion for lives in completions for completion in lives(rows)],
                keys=keys,
                waitpoints={found.waitpoint_id: found for found in waitpoints(rows) if found is not None},
            )
            return gate_rules.open_gate(gate_rows, ask, Fence.of(fields), now)

        return await self.runtime.decide_and_commit(reads, decide)

    async def _with_links(self, execution: str, opened: OpenGate, keys: list[SigningKey]) -> OpenedGate:
        """Return the gate with the tokens of its waitpoints, signed with the same keys as when it was opened."""
        kids, partition = opened.kids, ids.partition_of(ids.ExecutionId(execution))
        if len(kids) < len(opened.gate.waitpoints):
            reads = ReadSet()
            waitpoints = reads.each(Waitpoint, ((waitpoint, partition) for waitpoint, _ in opened.gate.waitpoints))
            found = waitpoints((await self.runtime.load(reads)).rows)
            kids = tuple("" if row is None else row.token_kid for row in found)
        links = [
            WaitpointLink(
                waitpoint,
                key,
                waitpoint_tokens.WaitpointToken(waitpoint_tokens.remint_token(keys, kid, execution, waitpoint)),
            )
            for (waitpoint, key), kid in zip(opened.gate.waitpoints, kids, strict=True)
        ]
        return OpenedGate(opened.name, opened.gate, links)

    async def park(
        self, handle: Handle, gates: tuple[str, ...], *, reason_code: str = "waiting_for_signal"
    ) -> ParkResult | park_rules.GatesReady:
        """Release the lease until one of these gates closes; keep it if one has closed or timed out."""
        fields = self.runtime.handle_fields(handle)
        names = validate_suspension.validate_names("gates", gates)
        reason = validation.text("reason_code", reason_code, limit=validation.MAX_NAME_BYTES)
        execution, suspension_id = fields.execution_id, self.runtime.minter.uuid()
        reads = ReadSet()
        row, suspension = reads.one(Execution, execution), reads.one(Suspension, execution)
        memos = reads.each(GateMemo, ((execution, name) for name in names))

        def decide(rows: Rows, now: int) -> Decision[park_rules.ParkedExecution | park_rules.GatesReady]:
            return park_rules.park(
                row(rows),
                suspension(rows),
                {memo.gate: memo for memo in memos(rows) if memo is not None},
                names,
                suspension_id=suspension_id,
                reason_code=reason,
                fence=Fence.of(fields),
                holder=fields,
                now=now,
            )

        answer = await self.runtime.decide_and_commit(reads, decide)
        if isinstance(answer, park_rules.GatesReady):
            return answer
        return ParkResult(
            answer.suspension_id, Handle.mint(self.runtime.store.tag, HandleKind.SUSPENDED, answer.holder)
        )

    async def read_waits(self, execution_id: str) -> Waits:
        """Return the open gates of an execution, and the memos of the closed ones."""
        reads, execution = ReadSet(), validate.validate_execution_id(execution_id)
        suspension, memos = reads.one(Suspension, execution), reads.many(GateMemo, execution)
        rows = (await self.runtime.load(reads)).rows
        return Waits(wait_state.open_gates(suspension(rows)), {memo.gate: memo for memo in memos(rows)})

    async def read_votes(self, memo: GateMemo) -> list[ObservedSignal]:
        """Return the signals that closed a gate, in the order in which they were accepted."""
        if not isinstance(memo, GateMemo):
            raise errors.InvalidInput("memo: not a GateMemo")
        votes = [] if memo.votes is None else msgspec.json.decode(memo.votes, type=list[Vote])
        reads = ReadSet()
        signals = reads.each(Signal, ((memo.execution_id, vote.member, vote.seq) for vote in votes if vote.seq))
        rows = (await self.runtime.load(reads)).rows if reads else []
        return [wait_state.observed_signal(signal) for signal in signals(rows) if signal is not None]

    async def send_message(self, args: MessageArgs) -> Accepted | DuplicateDelivery:
        """Send a message to an execution that has not ended; messages are kept in order until they are received."""
        ask = validate_suspension.validate_mail(args)
        key, call = wait_encoding.key_digest(ask.idempotency_key or ""), str(self.runtime.minter.change_id())
        reads = ReadSet()
        row, suspension = reads.one(Execution, ask.execution_id), reads.one(Suspension, ask.execution_id)
        earlier = reads.one(IdempotencyRecord, ask.execution_id, ask.scope, key)
        return await self.root_queues.decide_and_commit(
            ask.execution_id,
            reads,
            lambda rows, now: mailbox.send_message(row(rows), suspension(rows), earlier(rows), ask, now, call=call),
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
        """Record the result of a step; if one was recorded before, keep and return that."""
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
        reads = ReadSet()
        row = reads.one(Execution, memo.execution_id)
        recorded = reads.one(StepMemo, memo.execution_id, memo.name, memo.occurrence)
        cached = self.runtime._lease_cache.get(fields.execution_id)
        return await self.runtime.decide_and_commit(
            reads,
            lambda rows, now: steps.record_step(row(rows), recorded(rows), memo, Fence.of(fields), now),
            assumed_rows=None if cached is None else reads.assume(row, cached),
        )

    async def read_steps(self, execution_id: str) -> list[StepMemo]:
        """Return the recorded steps of an execution, by name and occurrence."""
        reads = ReadSet()
        memos = reads.many(StepMemo, validate.validate_execution_id(execution_id))
        return memos((await self.runtime.load(reads)).rows)

    async def read_steps_as_holder(self, handle: Handle) -> list[StepMemo]:
        """Return the recorded steps of the held execution; no round trip if its cached row says that it has none."""
        fields = self.runtime.handle_fields(handle)
        cached = self.runtime._lease_cache.get(fields.execution_id)
        if cached is not None and cached.lease_id == fields.lease_id and not cached.has_steps:
            return []
        return await self.read_steps(fields.execution_id)
