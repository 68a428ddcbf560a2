"""Lives of durable functions: continue as new, and delete what the former life remembered."""

from __future__ import annotations

from collections.abc import Sequence

from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import suspension as validate_suspension
from flowfabric.handles import Handle
from flowfabric.model.answers.execution import Continued
from flowfabric.model.execution import Execution
from flowfabric.model.gate import GateMemo, Reply
from flowfabric.model.suspension import Suspension
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision
from flowfabric.rules.durable import asks, lives
from flowfabric.rules.durable.lives import MAX_FORGOTTEN, REMEMBERED, LifeRows, Memo
from flowfabric.rules.execution.fences import Fence
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.queries import Scan, Where


class Lives:
    """Begins the next life of a run, and forgets the former one."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    async def continue_as_new(
        self, handle: Handle, input_payload: bytes, *, encoding: str | None, unmet: Sequence[str]
    ) -> Continued:
        """Begin the next life in one change, then delete what that change did not."""
        fields = self.runtime.handle_fields(handle)
        payload = validation.payload("input_payload", input_payload)
        name = validation.optional_name("encoding", encoding)
        gates = validate_suspension.validate_names("unmet", unmet)
        execution, reads = fields.execution_id, ReadSet()
        row, root = reads.one(Execution, execution), reads.one(Suspension, execution)
        closed = reads.each(GateMemo, ((execution, gate) for gate in gates))
        memos, has_more = await self._scan(execution)
        replies = reads.each(Reply, _received_asks(execution, memos, gates))

        def decide(rows: Rows, now: int) -> Decision[Continued]:
            unmet = [memo for memo in closed(rows) if memo is not None]
            found = LifeRows(row(rows), root(rows), unmet, memos, has_more, replies(rows))
            return lives.continue_as_new(found, payload, name, Fence.of(fields), now)

        continued = await self.runtime.decide_and_commit(reads, decide)
        if not continued.is_forgotten:
            await self.forget(execution)
        return continued

    async def forget(self, execution_id: str) -> bool:
        """Delete what the former life of a run remembered, some rows a change; False if nothing was left of it."""
        execution = validate.validate_execution_id(execution_id)
        has_more, done = True, False
        while has_more:
            answer = await self._forget_some(execution)
            has_more, done = bool(answer), done or answer is not None
        return done

    async def _forget_some(self, execution: str) -> bool | None:
        """Delete some memos; return whether there are more, None if there was nothing to forget."""
        memos, has_more = await self._scan(execution)
        reads = ReadSet()
        row, replies = reads.one(Execution, execution), reads.each(Reply, _received_asks(execution, memos))

        def decide(rows: Rows, now: int) -> Decision[bool | None]:
            return lives.forget(LifeRows(row(rows), memos=memos, has_more=has_more, replies=replies(rows)))

        return await self.runtime.decide_and_commit(reads, decide)

    async def _scan(self, execution_id: str) -> tuple[list[Memo], bool]:
        """Return memos that one change may delete, and whether there are more."""
        found: list[Memo] = []
        for kind in REMEMBERED:
            key = TABLE[kind].key
            where = (Where(key[0], "=", execution_id),)
            found += await self.runtime.scan(Scan(kind, where, key, limit=MAX_FORGOTTEN + 1 - len(found)))
            if len(found) > MAX_FORGOTTEN:
                return found[:MAX_FORGOTTEN], True
        return found, False


def _received_asks(execution: str, memos: Sequence[Memo], unmet: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return the keys of the replies to messages that these memos say were received; `unmet` gates give theirs back."""
    received = (memo for memo in memos if isinstance(memo, GateMemo) and memo.gate not in unmet)
    return [(execution, message_id) for message_id in asks.received_asks(received)]
