"""Operations on runs whose code changes under way: patches, pins, held runs and their release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from flowfabric import errors
from flowfabric.engine.metrics.queue_depth import GaugeReader
from flowfabric.engine.operations.search import format_search_cursor, parse_search_cursor
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import suspension as validate_suspension
from flowfabric.engine.validation.execution_filter import validate_namespaces
from flowfabric.handles import Handle
from flowfabric.model.execution import Execution
from flowfabric.model.gate import StepMemo
from flowfabric.model.states import PublicState
from flowfabric.model.suspension import Suspension
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision
from flowfabric.rules.durable import pins, releases
from flowfabric.rules.durable.steps import MemoArgs
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.scheduling import capabilities, queue
from flowfabric.stores.queries import Scan, Search, Where

MAX_HELD = 1000
SEARCH_BUDGET = 2000  # rows that one call of `count_old_ways` reads
UNFINISHED = (
    PublicState.WAITING,
    PublicState.DELAYED,
    PublicState.RATE_LIMITED,
    PublicState.WAITING_CHILDREN,
    PublicState.ACTIVE,
    PublicState.SUSPENDED,
)


class OldWays(msgspec.Struct, frozen=True):
    """Unfinished runs that keep code from being removed: by patch those that go the old way, by version pinned ones.

    One call counts a limited number of executions; with a cursor there are more.
    """

    patches: dict[str, int]
    pinned: dict[str, int]
    next_cursor: str | None = None


class HeldRuns:
    """Operations on runs that are held, patched or pinned."""

    def __init__(self, runtime: Runtime, gauges: GaugeReader) -> None:
        self.runtime = runtime
        self.gauges = gauges

    async def record_patch(self, handle: Handle, patch: str, *, is_new: bool, number: int | None = None) -> StepMemo:
        """Record the run's answer to a patch; if one was recorded before, it stays and is the answer."""
        fields = self.runtime.handle_fields(handle)
        name = validate_suspension.validate_name("patch", patch)
        args = MemoArgs(
            name=releases.PATCH_PREFIX + name, result=b"true" if is_new else b"false", encoding="json", number=number
        )
        memo = validate_suspension.step_memo(fields, args)
        reads = ReadSet()
        row = reads.one(Execution, fields.execution_id)
        known = reads.one(StepMemo, fields.execution_id, memo.name, 0)

        def decide(rows: Rows, now: int) -> Decision[StepMemo]:
            return releases.record_patch(
                row(rows), known(rows), memo, is_new=bool(is_new), fence=Fence.of(fields), now=now
            )

        return await self.runtime.decide_and_commit(reads, decide)

    async def pin_version(self, handle: Handle, version: str, *, number: int | None = None) -> StepMemo:
        """Require this version of the code from now on; one that was recorded before stays and is the answer."""
        fields = self.runtime.handle_fields(handle)
        name = _validate_version(version)
        args = MemoArgs(name=pins.PIN, result=msgspec.json.encode(name), encoding="json", number=number)
        memo = validate_suspension.step_memo(fields, args)
        reads = ReadSet()
        row = reads.one(Execution, fields.execution_id)
        known = reads.one(StepMemo, fields.execution_id, memo.name, 0)

        def decide(rows: Rows, now: int) -> Decision[StepMemo]:
            return pins.pin_version(row(rows), known(rows), memo, version=name, fence=Fence.of(fields), now=now)

        return await self.runtime.decide_and_commit(reads, decide)

    async def unpin(self, execution_id: str, *, version: str | None = None) -> bool:
        """Let workers of any version continue a pinned run, or those of `version`; False if nothing changes."""
        execution = validate.validate_execution_id(execution_id)
        name = None if version is None else _validate_version(version)
        return await self.runtime.decide_execution(execution, lambda row, _: pins.unpin(row, name))

    async def count_held(self, *, namespaces: Sequence[str] | None = None) -> dict[str, int]:
        """Count the runs that wait for other code, by task; all of them together up to 10,000."""
        return dict(await self.gauges.count_held(validate_namespaces(None, namespaces)))

    async def count_old_ways(self, *, namespaces: Sequence[str] | None = None, cursor: str | None = None) -> OldWays:
        """Count unfinished runs that go the old way of a patch or are pinned, after the cursor."""
        wanted = validate_namespaces(None, namespaces)
        where: tuple[Where, ...] = (Where("public_state", "in", UNFINISHED),)
        if wanted is not None:
            where += (Where("namespace", "in", wanted),)
        after = None if cursor is None else parse_search_cursor(cursor)
        page = await self.runtime.search(Search(where, None, after, SEARCH_BUDGET, SEARCH_BUDGET))
        patches: Counter[str] = Counter()
        pinned: Counter[str] = Counter()
        for found in page.found:
            patches.update(releases.old_ways(found.row))
            if (version := capabilities.pinned_version(found.row.required_capabilities)) is not None:
                pinned[version] += 1
        return OldWays(dict(patches), dict(pinned), None if page.after is None else format_search_cursor(page.after))

    async def release_held(
        self, execution_id: str, *, accept: bool = False, version: str | None = None, sender: str = ""
    ) -> bool:
        """Resume a run that waits for other code; False if it does not."""
        execution = validate.validate_execution_id(execution_id)
        by = validation.text("sender", sender)
        tried = validation.optional_name("version", version)
        message_id = self.runtime.minter.uuid()
        reads = ReadSet()
        row, suspension = reads.one(Execution, execution), reads.one(Suspension, execution)
        held = reads.each(StepMemo, () if tried is None else ((execution, releases.HELD_PREFIX + tried, 0),))

        def decide(rows: Rows, now: int) -> Decision[bool]:
            return releases.release_held(
                row(rows),
                suspension(rows),
                next(iter(held(rows)), None),
                accept=bool(accept),
                message_id=message_id,
                sender=by,
                now=now,
            )

        return await self.runtime.decide_and_commit(reads, decide)

    async def list_held(self, tasks: Sequence[str], *, namespace: str = "default", limit: int = MAX_HELD) -> list[str]:
        """Return runs of these tasks that wait for other code, by task, at most `limit` of them."""
        names = [validation.name("tasks", task) for task in validate.validate_iterable("tasks", tasks)]
        owner = validation.text("namespace", namespace)
        most = validation.integer("limit", limit, least=1, most=MAX_HELD)
        keys = tuple(queue.held_by_key(name) for name in dict.fromkeys(names))
        where = (Where("blocked_on", "in", keys), Where("namespace", "=", owner))
        rows = await self.runtime.scan(Scan(Execution, where, ("blocked_on", "rank", "execution_id"), limit=most))
        return [row.execution_id for row in rows]


def _validate_version(version: object) -> str:
    """Return a version that a worker may offer as a capability, or raise `InvalidInput`."""
    name = validation.name("version", version)
    if not name:
        raise errors.InvalidInput("version: empty")
    validate.validate_capabilities((capabilities.version_token(name),))
    return name
