"""The waits of a durable function, for the SDK: gates, mailboxes, children and remembered steps."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from flowfabric import ids
from flowfabric.engine.operations.signing_keys import KEYSTORE, Keys
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import suspension as validate_suspension
from flowfabric.handles import Handle, HandleFields, HandleKind
from flowfabric.model.change import Change, Put
from flowfabric.model.execution import Execution
from flowfabric.model.gate import ChildEnd, Gate, GateMemo, Mail, StepMemo, Vote
from flowfabric.model.signing_key import SigningKey
from flowfabric.model.suspension import Remembered, Signal, Suspension, Waitpoint
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.durable import mailbox, steps
from flowfabric.rules.durable import park as park_rules
from flowfabric.rules.durable.gates import GateArgs, OpenGate, Scene
from flowfabric.rules.durable.mailbox import MailArgs
from flowfabric.rules.durable.park import LookAt
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.security import waitpoint_token as waitpoint_tokens
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension.signals import Accepted, Duplicate
from flowfabric.rules.suspension.state import ObservedSignal
from flowfabric.stores.queries import Scan, Want, Where

FOLD_LIMIT = 1000


class Link(msgspec.Struct, frozen=True):
    """A waitpoint of a gate, and the token that lets its bearer vote."""

    waitpoint_id: str
    waitpoint_key: str
    token: waitpoint_tokens.WaitpointToken


class OpenedGate(msgspec.Struct, frozen=True):
    """A gate that nothing has closed yet."""

    name: str
    gate: Gate
    links: list[Link]


class Parked(msgspec.Struct, frozen=True):
    """The execution waits for its gates; the lease is gone."""

    suspension_id: str
    handle: Handle


class Waits(msgspec.Struct, frozen=True):
    """What a function has waited for and still waits for."""

    open: dict[str, Gate]
    memos: dict[str, GateMemo]


class Gates(Keys):
    """What a durable function does to wait."""

    taking_in: dict[str, bool]  # parents whose children's ends are being taken in, and whether to look again
    folds: set[asyncio.Task[int]]

    async def open_gate(self, handle: Handle, args: GateArgs) -> OpenedGate | GateMemo:
        """Open a gate by name, find it open with the same links, or find what came of it."""
        fields, ask = self.opened(handle), validate_suspension.gate(args)
        execution, fence = fields.execution_id, _fence(fields)
        seen: list[SigningKey] = []
        mail_seq = 0
        while True:
            wants = self._gate_wants(execution, ask, mail_seq)

            def decide(rows: list[list[Any]], now: int) -> Decision[OpenGate | GateMemo | LookAt]:
                seen[:] = self.keys_in(rows[3])
                scene = Scene(
                    row=_first(rows[0]),
                    root=_first(rows[1]),
                    memo=_first(rows[4]),
                    mail=_first(rows[5]),
                    ends=[end for found in rows[6:] for end in found if isinstance(end, ChildEnd)],
                    keys=seen,
                    waitpoints={
                        one.waitpoint_id: one for some in rows[6:] for one in some if isinstance(one, Waitpoint)
                    },
                )
                return gate_rules.open_gate(scene, ask, fence, now)

            answer = await self.settle(wants, decide)
            if isinstance(answer, LookAt):
                mail_seq = answer.seq
            elif isinstance(answer, GateMemo):
                return answer
            else:
                return await self._linked(execution, answer, seen)

    def _gate_wants(self, execution: str, ask: GateArgs, mail_seq: int) -> tuple[Want, ...]:
        partition = ids.partition_of(ids.ExecutionId(execution))
        return (
            Want(Execution, (execution,)),
            Want(Suspension, (execution,)),
            *KEYSTORE,
            Want(GateMemo, (execution, ask.name)),
            Want(Mail, (execution, ask.mailbox or "", mail_seq)),
            *(Want(ChildEnd, (execution, child)) for child in ask.children),
            *(Want(Waitpoint, (one, partition)) for one, _ in ask.waitpoints),
        )

    async def _linked(self, execution: str, opened: OpenGate, keys: list[SigningKey]) -> OpenedGate:
        """The gate with the tokens of its waitpoints; those of one that was there before are signed as they were."""
        kids, partition = opened.kids, ids.partition_of(ids.ExecutionId(execution))
        if len(kids) < len(opened.gate.waitpoints):
            found = await self.load([Want(Waitpoint, (one, partition)) for one, _ in opened.gate.waitpoints])
            kids = tuple(rows[0].token_kid if rows else "" for rows in found.rows)
        links = [
            Link(one, key, waitpoint_tokens.WaitpointToken(waitpoint_tokens.token_of(keys, kid, execution, one)))
            for (one, key), kid in zip(opened.gate.waitpoints, kids, strict=True)
        ]
        return OpenedGate(opened.name, opened.gate, links)

    async def park(
        self, handle: Handle, gates: tuple[str, ...], *, reason_code: str = "waiting_for_signal"
    ) -> Parked | park_rules.Ready:
        """Give the lease back until one of these gates closes; if one has, or its time is over, keep it."""
        fields = self.opened(handle)
        names = validate_suspension.names("gates", gates)
        reason = validation.text("reason_code", reason_code, limit=validation.MAX_NAME_BYTES)
        execution, suspension_id = fields.execution_id, self.minter.uuid()
        wants = (
            Want(Execution, (execution,)),
            Want(Suspension, (execution,)),
            *(Want(GateMemo, (execution, name)) for name in names),
        )

        def decide(rows: list[list[Any]], now: int) -> Decision[park_rules.Parked | park_rules.Ready]:
            memos = {found[0].gate: found[0] for found in rows[2:] if found}
            return park_rules.park(
                _first(rows[0]),
                _first(rows[1]),
                memos,
                names,
                suspension_id=suspension_id,
                reason_code=reason,
                fence=_fence(fields),
                holder=fields,
                now=now,
            )

        answer = await self.settle(wants, decide)
        if isinstance(answer, park_rules.Ready):
            return answer
        return Parked(answer.suspension_id, Handle.mint(self.store.tag, HandleKind.SUSPENDED, answer.holder))

    async def read_waits(self, execution_id: str) -> Waits:
        """The gates of an execution: those that are open, and what came of the others."""
        execution = validate.execution(execution_id)
        loaded = await self.load((Want(Suspension, (execution,)), Want(GateMemo, (execution,))))
        return Waits(wait_state.open_gates(_first(loaded.rows[0])), {memo.gate: memo for memo in loaded.rows[1]})

    async def read_votes(self, memo: GateMemo) -> list[ObservedSignal]:
        """The signals that closed a gate, in the order in which they were accepted."""
        votes = [] if memo.votes is None else msgspec.json.decode(memo.votes, type=list[Vote])
        wants = [Want(Signal, (memo.execution_id, vote.member, vote.seq)) for vote in votes if vote.seq]
        loaded = await self.load(wants) if wants else None
        return [] if loaded is None else [wait_state.observed(found[0]) for found in loaded.rows if found]

    # -- mailboxes ------------------------------------------------------------------------------------------------

    async def send_message(self, args: MailArgs) -> Accepted | Duplicate:
        """Send a message to an execution that has not ended; it is kept in order until somebody receives it."""
        ask = validate_suspension.message(args)
        key, call = wait_encoding.digest(ask.idempotency_key or ""), str(self.minter.change_id())
        wants = (
            Want(Execution, (ask.execution_id,)),
            Want(Suspension, (ask.execution_id,)),
            Want(Remembered, (ask.execution_id, ask.scope, key)),
        )
        return await self.together.settle(
            ask.execution_id,
            wants,
            lambda rows, now: mailbox.send(_first(rows[0]), _first(rows[1]), _first(rows[2]), ask, now, call=call),
        )

    # -- children -------------------------------------------------------------------------------------------------

    def follow_children(self, change: Change, _: object) -> None:
        """Take a child's end in at once; the sweep does it when this process cannot."""
        for write in change.writes:  # compared by type: this runs for every change
            if type(write) is Put and type(write.row) is ChildEnd and write.row.due_at is not None:
                parent = write.row.parent_id
                if parent in self.taking_in:
                    self.taking_in[parent] = True
                else:
                    self.taking_in[parent] = False
                    fold = asyncio.create_task(self._fold(parent))
                    self.folds.add(fold)
                    fold.add_done_callback(self._folded)

    def _folded(self, fold: asyncio.Task[int]) -> None:
        self.folds.discard(fold)
        if not fold.cancelled():
            fold.exception()  # a failure is left to the sweep

    async def _fold(self, parent_id: str) -> int:
        taken = 0
        try:
            while True:
                self.taking_in[parent_id] = False
                taken += await self.take_in_children(parent_id)
                if not self.taking_in[parent_id]:
                    return taken
        finally:
            del self.taking_in[parent_id]

    async def take_in_children(self, parent_id: str) -> int:
        """Let a parent's gates know of the children that ended; how many ends there were."""
        parent = validate.execution(parent_id)
        where = (Where("parent_id", "=", parent), Where("due_at", "set"))
        ends = await self.scan(Scan(ChildEnd, where, ("parent_id", "child_id", "life"), limit=FOLD_LIMIT))
        if not ends:
            return 0
        wants = (
            Want(Execution, (parent,)),
            Want(Suspension, (parent,)),
            *(Want(ChildEnd, (parent, end.child_id, end.life)) for end in ends),
        )
        return await self.settle(
            wants,
            lambda rows, now: gate_rules.take_in(
                _first(rows[0]), _first(rows[1]), [found[0] for found in rows[2:] if found], now
            ),
        )

    async def folds_done(self) -> None:
        """Wait until no end of a child is being taken in."""
        while self.folds:
            await asyncio.wait(self.folds)

    # -- steps ----------------------------------------------------------------------------------------------------

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
        fields = self.opened(handle)
        memo = StepMemo(
            execution_id=fields.execution_id,
            name=validate_suspension.name_of("name", name),
            occurrence=validation.integer("occurrence", occurrence, least=0),
            attempt_index=fields.attempt_index,
            recorded_at=0,
            result=validation.payload("result", result),
            encoding=validation.optional_text("encoding", encoding, limit=validation.MAX_NAME_BYTES),
            digest=validation.optional_text("digest", digest, limit=validation.MAX_NAME_BYTES),
        )
        key = (memo.execution_id, memo.name, memo.occurrence)
        seen = self._seen.get(fields.execution_id)
        return await self.settle(
            (Want(Execution, key[:1]), Want(StepMemo, key)),
            lambda rows, now: steps.record_step(_first(rows[0]), _first(rows[1]), memo, _fence(fields), now),
            trusting=None if seen is None else [[seen], []],
        )

    async def read_steps(self, execution_id: str) -> list[StepMemo]:
        """What the steps of an execution returned, by name and occurrence."""
        return (await self.load((Want(StepMemo, (validate.execution(execution_id),)),))).rows[0]

    async def remembered_steps(self, handle: Handle) -> list[StepMemo]:
        """The same for whoever holds the execution: one that never had a step costs no trip."""
        fields = self.opened(handle)
        seen = self._seen.get(fields.execution_id)
        if seen is not None and seen.lease_id == fields.lease_id and not seen.has_steps:
            return []
        return await self.read_steps(fields.execution_id)


def _fence(fields: HandleFields) -> Fence:
    return Fence(fields.lease_id, fields.lease_epoch, fields.attempt_id)


def _first(rows: list[Any]) -> Any:
    return rows[0] if rows else None
