"""Operations of durable functions: gates, mailboxes, children and recorded steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.durable.children import ChildSpawner
from flowfabric.engine.durable.facts import FactReading, Facts
from flowfabric.engine.durable.held_runs import MAX_HELD, HeldRuns, OldWays
from flowfabric.engine.durable.lives import Lives
from flowfabric.engine.durable.messages import Messages
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.read_set import ReadSet, load_each, load_many
from flowfabric.engine.runtime.recent_keys import RecentKeys
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.signing_keys import SigningKeys
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import suspension as validate_suspension
from flowfabric.handles import Handle, HandleFields, HandleKind
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution
from flowfabric.model.gate import (
    ChildCompletion,
    Fact,
    Gate,
    GateMemo,
    MailboxMessage,
    Reply,
    StepMemo,
    StepState,
    Vote,
    step_row_name,
)
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.model.suspension import Signal, Suspension, Waitpoint
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.durable import leave, mailbox, steps
from flowfabric.rules.durable import park as park_rules
from flowfabric.rules.durable.asks import ReplyArgs
from flowfabric.rules.durable.facts import FactArgs
from flowfabric.rules.durable.gates import GateArgs, GateRows, NeedsMessages, OpenGate
from flowfabric.rules.durable.keys import BATCH_MAILBOX
from flowfabric.rules.durable.leave import LeaveRows, LeftOperation
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.durable.park import GatesClosed, GatesReady, ParkedExecution, ParkRows
from flowfabric.rules.durable.steps import MemoArgs
from flowfabric.rules.execution import fences, progress
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.security import waitpoint_token as waitpoint_tokens
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension.signals import Accepted, DuplicateDelivery
from flowfabric.rules.suspension.state import ObservedSignal
from flowfabric.stores.queries import Read, Scan, Where

_DONE, _FAILED = StepState.DONE, StepState.FAILED  # hot path: found faster than a member of an enum


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


class Remembered(msgspec.Struct, frozen=True):
    """Everything that earlier attempts of a function left behind: step memos, open gates, memos of closed gates."""

    steps: list[StepMemo]
    open: dict[str, Gate]
    memos: dict[str, GateMemo]
    progress_counts: dict[str, int] = {}  # how often each branch has reported progress


class StepRecorder(Protocol):
    """The part of an engine that records steps, in the store or on a server."""

    async def _record_step(self, handle: Handle, args: MemoArgs, state: StepState) -> StepMemo: ...

    async def record_step(
        self,
        handle: Handle,
        name: str,
        occurrence: int,
        result: bytes,
        *,
        encoding: str | None = None,
        digest: str | None = None,
        state: StepState = StepState.DONE,
        number: int | None = None,
        started_at: int | None = None,
    ) -> StepMemo:
        """Record the result of a step, or another state of it. If a result or failure was recorded before, it stays and
        is the answer: see its `state`."""
        args = MemoArgs(
            name=name,
            occurrence=occurrence,
            result=result,
            encoding=encoding,
            digest=digest,
            number=number,
            started_at=started_at,
        )
        return await self._record_step(handle, args, state)


class DurableOperations:
    """Operations of durable functions."""

    child_spawner: ChildSpawner
    facts: Facts
    held_runs: HeldRuns
    lives: Lives
    messages: Messages
    runtime: Runtime
    signing_keys: SigningKeys
    first_leases: RecentKeys

    async def open_gate(self, handle: Handle, args: GateArgs) -> OpenedGate | GateMemo:
        """Open a gate by name; return it as it is if it is open already, and its memo if it has closed."""
        fields, ask = self.runtime.handle_fields(handle), validate_suspension.validate_gate(args)
        keys: list[SigningKey] = []
        answer = await self._open_gate(fields, ask, (), keys)
        while isinstance(answer, NeedsMessages):
            answer = await self._open_gate(fields, ask, answer.heads, keys)
        return answer if isinstance(answer, GateMemo) else await self._with_links(fields.execution_id, answer, keys)

    async def _open_gate(
        self, fields: HandleFields, ask: GateArgs, heads: Sequence[tuple[str, int]], keys: list[SigningKey]
    ) -> OpenGate | GateMemo | NeedsMessages:
        """Decide on a gate with these messages of its mailboxes loaded; `keys` receives the signing keys."""
        reads, execution = ReadSet(), fields.execution_id
        partition = ids.partition_of(ids.ExecutionId(execution))
        row, root = reads.one(Execution, execution), reads.one(Suspension, execution)
        key_rows, memo = reads.many(SigningKey, 0), reads.one(GateMemo, execution, ask.name)
        left = reads.one(StepMemo, execution, step_row_name(ask.name, StepState.LEFT), 0)
        messages = reads.each(MailboxMessage, ((execution, *head) for head in heads))
        completions = [reads.many(ChildCompletion, execution, child) for child in ask.children]
        waitpoints = reads.each(Waitpoint, ((waitpoint, partition) for waitpoint, _ in ask.waitpoints))

        def decide(rows: Rows, now: int) -> Decision[OpenGate | GateMemo | NeedsMessages]:
            keys[:] = self.signing_keys.unseal_loaded_keys(key_rows(rows))
            gate_rows = GateRows(
                row=row(rows),
                root=root(rows),
                memo=memo(rows),
                is_left=left(rows) is not None,
                messages=[message for message in messages(rows) if message is not None],
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
            wanted = ((waitpoint, partition) for waitpoint, _ in opened.gate.waitpoints)
            found = await load_each(self.runtime, Waitpoint, wanted)
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
    ) -> ParkResult | GatesReady:
        """Release the lease until one of these gates closes; keep it if one has closed or timed out."""
        answer = await self.open_gates_and_park(handle, (), names=gates, reason_code=reason_code)
        return answer if isinstance(answer, ParkResult) else GatesReady(tuple(answer.memos))

    async def open_gates_and_park(
        self,
        handle: Handle,
        gates: tuple[GateArgs, ...],
        *,
        names: tuple[str, ...] = (),
        reason_code: str = "waiting_for_signal",
    ) -> ParkResult | GatesClosed:
        """Open gates without links and release the lease until one of them, or of `names`, closes, in one change.

        If one has closed or closes at once, the lease is kept and the memos of the closed ones are returned. The others
        are open then.
        """
        known = validate_suspension.validate_names("gates", names)
        reason = validation.name("reason_code", reason_code)
        answer = await self._park(handle, gates, known, reason)
        if isinstance(answer, GatesClosed):
            return answer
        return ParkResult(
            answer.suspension_id, Handle.mint(self.runtime.store.tag, HandleKind.SUSPENDED, answer.holder)
        )

    async def open_gates(self, handle: Handle, gates: tuple[GateArgs, ...]) -> GatesClosed:
        """Open gates without links in one change; return the memos of those that have closed, or close at once."""
        answer = await self._park(handle, gates, (), "", only_open=True)
        assert isinstance(answer, GatesClosed)
        return answer

    async def _park(
        self,
        handle: Handle,
        gates: tuple[GateArgs, ...],
        known: tuple[str, ...],
        reason: str,
        *,
        only_open: bool = False,
    ) -> ParkedExecution | GatesClosed:
        fields = self.runtime.handle_fields(handle)
        new = validate_suspension.validate_new_gates(gates)
        execution, suspension_id = fields.execution_id, self.runtime.minter.uuid()
        reads = ReadSet()
        row, suspension = reads.one(Execution, execution), reads.one(Suspension, execution)
        all_names = dict.fromkeys((*known, *(args.name for args in new)))
        memos = reads.each(GateMemo, ((execution, name) for name in all_names))
        left = reads.each(StepMemo, ((execution, step_row_name(args.name, StepState.LEFT), 0) for args in new))
        children = dict.fromkeys(child for args in new for child in args.children)
        completions = [reads.many(ChildCompletion, execution, child) for child in children]
        messages = reads.more_each(MailboxMessage)
        mailboxes = Counter(name for args in new for name in args.receives)

        async def load_messages(rows: Rows) -> Rows:
            unread = [
                Read(MailboxMessage, (execution, name, seq))
                for name, count in mailboxes.items()
                for seq in mailbox.first_unread(suspension(rows), name, count)
            ]
            return (await self.runtime.load(unread)).rows if unread else []

        def decide(rows: Rows, now: int) -> Decision[ParkedExecution | GatesClosed | NeedsMessages]:
            park_rows = ParkRows(
                row=row(rows),
                root=suspension(rows),
                memos={memo.gate: memo for memo in memos(rows) if memo is not None},
                messages=[message for message in messages(rows) if message is not None],
                ends=[completion for lives in completions for completion in lives(rows)],
                left=frozenset(args.name for args, memo in zip(new, left(rows), strict=True) if memo is not None),
            )
            return park_rules.park(
                park_rows,
                new,
                known,
                suspension_id=suspension_id,
                reason_code=reason,
                fence=Fence.of(fields),
                holder=fields,
                now=now,
                only_open=only_open,
            )

        answer = await self.runtime.decide_and_commit(reads, decide, load_more=load_messages)
        while isinstance(answer, NeedsMessages):  # another branch received the message between the two loads
            answer = await self.runtime.decide_and_commit(reads, decide, load_more=load_messages)
        return answer

    async def leave_gates(
        self, handle: Handle, operations: Sequence[LeftOperation], *, memo: MemoArgs | None = None
    ) -> StepMemo | None:
        """Record that the function left these operations, and close their gates, in one change.

        A message that one of the gates has received goes back to the head of its mailbox. With `memo`, the winner of a
        race, that is recorded in the same change; if it was recorded before, it stays, nothing else changes, and it is
        the answer.
        """
        fields, left = self.runtime.handle_fields(handle), validate_suspension.validate_left(operations)
        new = None if memo is None else validate_suspension.step_memo(fields, memo)
        execution = fields.execution_id
        reads = ReadSet()
        row, suspension = reads.one(Execution, execution), reads.one(Suspension, execution)
        known = reads.each(StepMemo, () if new is None else ((execution, new.name, new.occurrence),))
        left_before = reads.each(StepMemo, ((execution, one.memo_name, one.occurrence) for one in left))
        memos = reads.each(GateMemo, ((execution, one.name) for one in left if one.is_gate))

        def decide(rows: Rows, now: int) -> Decision[StepMemo | None]:
            leave_rows = LeaveRows(
                row=row(rows),
                root=suspension(rows),
                known=next(iter(known(rows)), None),
                left=[found for found in left_before(rows) if found is not None],
                gate_memos={found.gate: found for found in memos(rows) if found is not None},
            )
            return leave.leave_gates(leave_rows, left, new, Fence.of(fields), now)

        return await self.runtime.decide_and_commit(reads, decide)

    async def read_waits(self, execution_id: str) -> Waits:
        """Return the open gates of an execution, and the memos of the closed ones."""
        reads, execution = ReadSet(), validate.validate_execution_id(execution_id)
        suspension, memos = reads.one(Suspension, execution), reads.many(GateMemo, execution)
        rows = (await self.runtime.load(reads)).rows
        return Waits(wait_state.open_gates(suspension(rows)), {memo.gate: memo for memo in memos(rows)})

    async def read_votes(self, memo: GateMemo) -> list[ObservedSignal]:
        """Return the signals that closed a gate, in the order in which they were accepted."""
        memo = validate.check_type("memo", memo, GateMemo)
        votes = [] if memo.votes is None else msgspec.json.decode(memo.votes, type=list[Vote])
        keys = ((memo.execution_id, vote.member, vote.seq) for vote in votes if vote.seq)
        signals = await load_each(self.runtime, Signal, keys)
        return [wait_state.observed_signal(signal) for signal in signals if signal is not None]

    async def send_message(self, args: MessageArgs) -> Accepted | DuplicateDelivery:
        """Send a message to an execution that has not ended; messages are kept in order until they are received."""
        return await self.messages.send(args)

    async def ask(self, args: MessageArgs, *, max_wait_ms: int = 0) -> Reply:
        """Send a message that wants a reply, unless it was sent before, and wait up to `max_wait_ms` for the reply.

        With an idempotency key the message's id is derived from it, so that the same question has the same reply for as
        long as the run is kept.
        """
        return await self.messages.ask(args, max_wait_ms=max_wait_ms)

    async def reply(self, handle: Handle, args: ReplyArgs, memo: MemoArgs) -> Reply:
        """Reply to a message as the holder of the lease, and record that; the first reply stays and is the answer."""
        return await self.messages.reply(handle, args, memo)

    async def close_inbox(self, handle: Handle, memo: MemoArgs) -> bool:
        """Close the inbox of the held execution if nothing is unread; what is recorded first stays the answer."""
        return await self.messages.close_inbox(handle, memo)

    async def read_reply(self, execution_id: str, message_id: str, *, max_wait_ms: int = 0) -> Reply:
        """Return the reply to a message that wants one; wait up to `max_wait_ms` while it is open."""
        return await self.messages.read_reply(execution_id, message_id, max_wait_ms=max_wait_ms)

    async def set_fact(self, handle: Handle, args: FactArgs) -> Fact:
        """Set a fact as the holder of the lease; a set that was counted before changes nothing."""
        return await self.facts.set_fact(handle, args)

    async def read_fact(self, execution_id: str, name: str, *, after: int = 0, max_wait_ms: int = 0) -> FactReading:
        """Return a fact whose number is greater than `after`; wait for it, or for the end, up to `max_wait_ms`."""
        return await self.facts.read_fact(execution_id, name, after=after, max_wait_ms=max_wait_ms)

    async def list_facts(self, execution_id: str) -> list[Fact]:
        """Return the facts of an execution by name."""
        return await self.facts.list_facts(execution_id)

    record_step = StepRecorder.record_step

    async def _record_step(self, handle: Handle, args: MemoArgs, state: StepState) -> StepMemo:
        fields = self.runtime.handle_fields(handle)
        recorded_state = validate_suspension.validate_step_state(state)
        memo = validate_suspension.step_memo(fields, args, recorded_state)
        cached = self._cached_without_failures(fields) if recorded_state is _DONE else None

        def reads() -> list[Read]:
            names = (memo.step, step_row_name(memo.step, _FAILED))
            ends = [Read(StepMemo, (memo.execution_id, end, memo.occurrence)) for end in names]
            return [Read(Execution, (memo.execution_id,)), *ends]

        def decide(rows: Rows, now: int) -> Decision[StepMemo]:
            row, done, failed = [found[0] if found else None for found in rows]
            return steps.record_step(row, done, failed, memo, Fence.of(fields), now)

        answer = await self.runtime.decide_and_commit(
            reads, decide, assumed_rows=None if cached is None else [[cached], [], []]
        )
        if recorded_state is _FAILED:
            self.first_leases.discard(fields.lease_id)
        return answer

    def _cached_without_failures(self, fields: HandleFields) -> Execution | None:
        """Return the cached row of a held execution if it has no recorded failure; None if that has to be loaded.

        It has none if it had no step when it was claimed and none has failed since. A failure that another process
        records changes the row's revision.
        """
        cached = self.runtime._lease_cache.get(fields.execution_id)
        if cached is not None and not cached.has_steps:
            self.first_leases.add(fields.lease_id)
        return cached if fields.lease_id in self.first_leases else None

    async def remembered(self, handle: Handle) -> Remembered:
        """Return what the held execution remembers, in one load; no round trip if its cached row says: nothing."""
        fields = self.runtime.handle_fields(handle)
        cached = self.runtime._lease_cache.get(fields.execution_id)
        if cached is not None and cached.lease_id == fields.lease_id and not (cached.has_steps or cached.has_waits):
            return Remembered([], {}, {})
        reads, execution = ReadSet(), fields.execution_id
        row, memos = reads.one(Execution, execution), reads.many(StepMemo, execution)
        suspension, closed = reads.one(Suspension, execution), reads.many(GateMemo, execution)
        loaded = await self.runtime.load(reads)
        rows = loaded.rows
        if (held := row(rows)) is None:
            raise errors.NotFound("execution", execution_id=execution)
        if refused := fences.check_lease(held, Fence.of(fields), loaded.now):
            refused.unwrap(loaded.now)
        return Remembered(
            memos(rows),
            wait_state.open_gates(suspension(rows)),
            {memo.gate: memo for memo in closed(rows)},
            progress.decode_counts(held),
        )

    async def read_steps(self, execution_id: str) -> list[StepMemo]:
        """Return the recorded steps of an execution in the order in which they began."""
        return steps.in_order(await load_many(self.runtime, StepMemo, validate.validate_execution_id(execution_id)))

    async def record_patch(self, handle: Handle, patch: str, *, is_new: bool, number: int | None = None) -> StepMemo:
        """Record the run's answer to a patch; if one was recorded before, it stays and is the answer."""
        return await self.held_runs.record_patch(handle, patch, is_new=is_new, number=number)

    async def release_held(
        self, execution_id: str, *, accept: bool = False, version: str | None = None, sender: str = ""
    ) -> bool:
        """Resume a run that waits for other code; False if it does not.

        With `accept` it takes the new way at the place where it was held. With `version` it is not resumed if that
        version has held it before.
        """
        return await self.held_runs.release_held(execution_id, accept=accept, version=version, sender=sender)

    async def list_held(self, tasks: Sequence[str], *, namespace: str = "default", limit: int = MAX_HELD) -> list[str]:
        """Return runs of these tasks that wait for other code, by task, at most `limit` of them."""
        return await self.held_runs.list_held(tasks, namespace=namespace, limit=limit)

    async def pin_version(self, handle: Handle, version: str, *, number: int | None = None) -> StepMemo:
        """Require this version of the code for the held execution; one that was recorded before stays."""
        self._cached_without_failures(self.runtime.handle_fields(handle))  # before its row says that it has steps
        return await self.held_runs.pin_version(handle, version, number=number)

    async def unpin(self, execution_id: str, *, version: str | None = None) -> bool:
        """Let workers of any version continue a pinned run, or those of `version`; False if nothing changes."""
        return await self.held_runs.unpin(execution_id, version=version)

    async def count_held(self, *, namespaces: Sequence[str] | None = None) -> dict[str, int]:
        """Count the runs that wait for other code, by task; all of them together up to 10,000."""
        return await self.held_runs.count_held(namespaces=namespaces)

    async def count_old_ways(self, *, namespaces: Sequence[str] | None = None, cursor: str | None = None) -> OldWays:
        """Count unfinished runs that go the old way of a patch or are pinned, after the cursor."""
        return await self.held_runs.count_old_ways(namespaces=namespaces, cursor=cursor)

    async def spawn(
        self, handle: Handle, asks: Sequence[CreateExecution], memos: Sequence[MemoArgs]
    ) -> list[answers.Created | answers.Duplicate]:
        """Create children of the held execution, and record each under its memo in the change that creates it.

        A child whose memo is recorded, or whose id or key exists, is answered as Duplicate. If one is refused, it and
        those after it are not created; each change creates up to 200.
        """
        return await self.child_spawner.spawn(handle, asks, memos)

    async def continue_as_new(
        self, handle: Handle, input_payload: bytes, *, encoding: str | None = None, unmet: Sequence[str] = ()
    ) -> answers.Continued:
        """Release the lease and begin the run's next life with another input, with nothing remembered.

        Id, key, tags, parent and unread messages stay. A message that one of the `unmet` gates has received goes back
        to its mailbox, because the function has not seen it.
        """
        return await self.lives.continue_as_new(handle, input_payload, encoding=encoding, unmet=unmet)

    async def read_batch(self, handle: Handle) -> list[MailboxMessage]:
        """Return the inputs of a batch, in the order of their submits. They stay, so that a retry finds them."""
        fields, reads = self.runtime.handle_fields(handle), ReadSet()
        execution, key = fields.execution_id, ("execution_id", "mailbox", "seq")
        row = reads.one(Execution, execution)
        loaded = await self.runtime.load(reads)
        if (held := row(loaded.rows)) is None:
            raise errors.NotFound("execution", execution_id=execution)
        if refused := fences.check_lease(held, Fence.of(fields), loaded.now):
            refused.unwrap(loaded.now)
        where = (Where("execution_id", "=", execution), Where("mailbox", "=", BATCH_MAILBOX))
        return await self.runtime.scan(Scan(MailboxMessage, where, key, limit=mailbox.MAX_UNREAD))
