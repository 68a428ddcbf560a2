"""Reads of flows: what people and consoles look at, and the summary that is projected for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.flows.completion_dispatcher import outgoing_edges, scan_edges
from flowfabric.engine.operations.explainer import Explainer
from flowfabric.engine.operations.pages import (
    ExecutionOutcome,
    ExecutionPage,
    ExpiredLease,
    ExpiredLeasePage,
    FlowPage,
    HistoryEntry,
    IdMatches,
    LanePage,
    SnapshotPage,
)
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.recent_creates import RecentCreates
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.wakeups import completion_topic, wait_for_wakeup
from flowfabric.engine.validation import execution as validate
from flowfabric.ids import parse_execution_id
from flowfabric.model.answers.execution import AttemptView
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import Attempt, Execution, Payload, Result
from flowfabric.model.flow import Edge, EdgeGroup, Flow, FlowMember, FlowSummary
from flowfabric.model.obstacles import Explanation
from flowfabric.model.states import LifecyclePhase, PublicState, TerminalOutcome
from flowfabric.rules import validation
from flowfabric.rules.execution import tags as tag_rules
from flowfabric.rules.execution import views
from flowfabric.rules.flow import views as flow_views
from flowfabric.rules.flow.build import EdgeSnapshot, edge_snapshot
from flowfabric.rules.flow.views import FlowSnapshot
from flowfabric.stores.queries import Read, Scan, Where

FIRST_CHECK_DELAY_S = 0.02  # that the end of what was just created is waited for before a look at it
MAX_MEMBERS_PER_LOAD = 500  # members that are looked at together
MAX_PAGE = 1000
SEARCH_BUDGET = 10_000  # rows that the store reads in one step of a search
MAX_EXPIRED_PAGE = 10_000
MAX_HISTORY_EVENTS = 1000
RENEWED = "renewed"  # told so often that nothing else would be left of a long life
MAX_MATCHES = 100
_HISTORY_FIELDS = (
    "lease_id",
    "lease_epoch",
    "attempt_id",
    "attempt_index",
    "worker_id",
    "worker_instance_id",
    "reason",
)


class ReadOperations:
    """Operations that read executions and flows."""

    runtime: Runtime
    explainer: Explainer
    recent_creates: RecentCreates

    async def explain(self, execution_id: str) -> Explanation:
        """Explain why an execution is not running."""
        return await self.explainer.explain(validate.validate_execution_id(execution_id))

    async def await_end(self, execution_id: str, *, max_wait_ms: int = 0) -> ExecutionOutcome | None:
        """How the execution ended; None when it has not within the time."""
        execution = parse_execution_id(validation.text("execution_id", execution_id))
        clock = asyncio.get_running_loop().time
        until = clock() + validation.duration_ms("max_wait_ms", max_wait_ms, least=0) / 1000
        wants = (Read(Execution, (execution,)), Read(Result, (execution,)))
        is_new = self.recent_creates.take(execution)
        while True:
            hint = self.runtime.wakeups.subscribe(completion_topic(execution))
            try:
                if is_new and until > clock():  # a look would be in vain, and in the way of whoever works on it
                    is_new = False
                    await asyncio.wait((hint,), timeout=min(FIRST_CHECK_DELAY_S, until - clock()))
                loaded = await self.runtime.load(wants)
                if not loaded.rows[0]:
                    raise errors.NotFound("execution", execution_id=execution)
                row: Execution = loaded.rows[0][0]
                if row.lifecycle_phase is LifecyclePhase.TERMINAL:
                    return _ended(row, loaded.rows[1][0] if loaded.rows[1] else None)
                left = until - clock()
                if left <= 0:
                    return None
                await wait_for_wakeup(hint, min(left, self.runtime.poll_interval_s))
            finally:
                hint.cancel()

    async def describe_flow(self, flow_id: str) -> FlowSnapshot | None:
        """The flow with its joins; None when there is none."""
        flow = validate.validate_flow_id(flow_id)
        found, groups = (await self.runtime.load((Read(Flow, (flow,)), Read(EdgeGroup, (flow,))))).rows
        return flow_views.flow_snapshot(found[0], groups) if found else None

    async def list_flows(self, partition: int | str, *, cursor: str | None = None, limit: int = 50) -> FlowPage:
        """Flows of one partition (its number or its key) by id, strictly after the cursor."""
        index = validate.validate_flow_partition(partition, self.runtime.partitions)
        wanted = min(validation.integer("limit", limit, least=0), MAX_PAGE)
        after = None if cursor is None else (index, validate.validate_flow_id(cursor))
        if not wanted:
            return FlowPage([])
        where = (Where("partition", "=", index),)
        rows = await self.runtime.store.scan(Scan(Flow, where, ("partition", "flow_id"), after, wanted + 1))
        page = [flow_views.flow_status(row) for row in rows[:wanted]]
        return FlowPage(page, page[-1].flow_id if len(rows) > wanted else None)

    async def list_flow_members(self, flow_id: str) -> list[str]:
        """Every member that was ever added, ascending."""
        found = (await self.runtime.load((Read(FlowMember, (validate.validate_flow_id(flow_id),)),))).rows[0]
        return [row.execution_id for row in found]

    async def list_outgoing_edges(self, flow_id: str, execution_id: str) -> list[EdgeSnapshot]:
        """The edges that lead away from an execution, by id."""
        flow, upstream = validate.validate_flow_id(flow_id), validate.validate_execution_id(execution_id)
        return [edge_snapshot(edge) for edge in await outgoing_edges(self.runtime, [upstream]) if edge.flow_id == flow]

    async def list_incoming_edges(self, flow_id: str, execution_id: str) -> list[EdgeSnapshot]:
        """The edges that lead to an execution, by id."""
        flow, downstream = validate.validate_flow_id(flow_id), validate.validate_execution_id(execution_id)
        found = await scan_edges(self.runtime, "downstream_execution_id", [downstream])
        return [edge_snapshot(edge) for edge in found if edge.flow_id == flow]

    async def list_edges(
        self, flow_id: str, *, outgoing: str | None = None, incoming: str | None = None
    ) -> list[EdgeSnapshot]:
        """The edges away from one execution, or to one."""
        if (outgoing is None) == (incoming is None):
            raise errors.InvalidInput("edges are listed either outgoing from or incoming to one execution")
        if outgoing is not None:
            return await self.list_outgoing_edges(flow_id, outgoing)
        return await self.list_incoming_edges(flow_id, incoming or "")

    async def describe_edge(self, flow_id: str, edge_id: str) -> EdgeSnapshot | None:
        """One edge; None when this flow has no such edge."""
        key = (validate.validate_flow_id(flow_id), validate.validate_edge_id(edge_id))
        found = (await self.runtime.load((Read(Edge, key),))).rows[0]
        return edge_snapshot(found[0]) if found else None

    async def resolve_execution_flow_id(self, execution_id: str) -> str | None:
        """The flow of an execution; None when it has none or does not exist."""
        found = (await self.runtime.load((Read(Execution, (validate.validate_execution_id(execution_id),)),))).rows[0]
        return found[0].flow_id if found else None

    async def get_flow_tag(self, flow_id: str, key: str) -> str | None:
        """One tag; None when the flow or the tag is missing."""
        if refused := tag_rules.check_tag_key(validation.text("key", key)):
            raise refused
        found = (await self.runtime.load((Read(Flow, (validate.validate_flow_id(flow_id),)),))).rows[0]
        return flow_views.tags_of(found[0]).get(key) if found else None

    async def get_flow_summary(self, flow_id: str) -> FlowSummary | None:
        """What the projector last counted; None before it did."""
        found = (await self.runtime.load((Read(FlowSummary, (validate.validate_flow_id(flow_id),)),))).rows[0]
        return found[0] if found else None

    async def project_flow_summary(self, flow_id: str) -> bool:
        """Count the members of a flow and write its summary; False when there is nothing to count."""
        flow = validate.validate_flow_id(flow_id)

        async def members(rows: Rows) -> Rows:
            names = [member.execution_id for member in rows[1]]
            found: list[Any] = []
            for start in range(0, len(names), MAX_MEMBERS_PER_LOAD):
                part = names[start : start + MAX_MEMBERS_PER_LOAD]
                found += (await self.runtime.load([Read(Execution, (name,)) for name in part])).rows
            return [[row for each in found for row in each]]

        return await self.runtime.decide_and_commit(
            (Read(Flow, (flow,)), Read(FlowMember, (flow,))),
            lambda rows, _: flow_views.project_summary(rows[0][0] if rows[0] else None, len(rows[1]), rows[2]),
            load_more=members,
        )

    async def describe_execution(self, execution_id: str) -> views.ExecutionSnapshot | None:
        """The execution for a reader; None when there is none, `Corruption` when what is kept of it cannot be read."""
        try:
            row = await self._row(execution_id)
            return None if row is None else views.execution_snapshot(row)
        except errors.Corruption as fault:
            raise errors.Corruption(f"describe_execution: {fault.detail}", execution_id=execution_id) from fault

    async def read_execution_info(self, execution_id: str) -> views.ExecutionInfo | None:
        """The execution for the API; None when there is none."""
        row, payload = await self._row_and_payload(execution_id)
        return None if row is None or payload is None else views.execution_info(row, payload)

    async def read_execution_state(self, execution_id: str) -> PublicState | None:
        """The one public word."""
        row = await self._row(execution_id)
        return None if row is None else row.public_state

    async def read_state_vector(self, execution_id: str) -> views.StateVector | None:
        """The seven dimensions."""
        row = await self._row(execution_id)
        return None if row is None else views.make_state_vector(row)

    async def read_results(
        self, execution_ids: Sequence[str], *, namespace: str | None = None
    ) -> dict[str, bytes | None]:
        """The results of many executions in one trip; None for one that has none.

        With a `namespace`, an execution of another one is a conflict.
        """
        wanted = [
            validate.validate_execution_id(execution)
            for execution in validate.validate_iterable("execution_ids", execution_ids)
        ]
        validation.optional_text("namespace", namespace)
        if not wanted:
            return {}
        owners = () if namespace is None else wanted
        wants = [Read(Result, (one,)) for one in wanted] + [Read(Execution, (one,)) for one in owners]
        found = (await self.runtime.load(wants)).rows
        for row in (row for rows in found[len(wanted) :] for row in rows):
            if row.namespace != namespace:
                raise errors.IdInOtherNamespace(execution_id=row.execution_id)
        return {one: rows[0].payload if rows else None for one, rows in zip(wanted, found, strict=False)}

    async def get_execution_result(self, execution_id: str) -> bytes | None:
        """The result's exact bytes; None until one is stored."""
        execution = validate.validate_execution_id(execution_id)
        loaded = await self.runtime.load((Read(Result, (execution,)),))
        return loaded.rows[0][0].payload if loaded.rows[0] else None

    async def read_execution_context(self, execution_id: str) -> views.ExecutionContext:
        """What a handler needs to begin."""
        row, payload = await self._row_and_payload(execution_id)
        if row is None or payload is None:
            raise errors.InvalidInput("execution_id: no such execution")
        return views.ExecutionContext(
            payload.input_payload or b"", payload.execution_kind, tag_rules.decode_tags(row.tags)
        )

    async def read_kinds(self, execution_ids: Iterable[str]) -> dict[str, str]:
        """What kinds these executions are of, in one trip; one that does not exist has none."""
        wanted = [
            validate.validate_execution_id(execution)
            for execution in validate.validate_iterable("execution_ids", execution_ids)
        ]
        loaded = await self.runtime.load([Read(Payload, (execution,)) for execution in wanted]) if wanted else None
        found = [] if loaded is None else loaded.rows
        return {execution: rows[0].execution_kind for execution, rows in zip(wanted, found, strict=True) if rows}

    async def read_current_attempt_index(self, execution_id: str) -> int:
        """The index of the latest attempt; 0 before the first claim."""
        return (await self._known(execution_id)).attempt_index or 0

    async def read_total_attempt_count(self, execution_id: str) -> int:
        """The index that the next fresh attempt will take."""
        return (await self._known(execution_id)).total_attempt_count

    async def read_progress(self, execution_id: str) -> tuple[int | None, str | None]:
        """What the holder last said of its progress: percentage and message."""
        row = await self._row(execution_id)
        if row is None:
            raise errors.NotFound("execution", execution_id=execution_id)
        return row.progress_pct, row.progress_message

    async def get_execution_namespace(self, execution_id: str) -> str | None:
        """The namespace; None when there is no such execution."""
        row = await self._row(execution_id)
        return None if row is None else row.namespace

    async def get_execution_tag(self, execution_id: str, key: str) -> str | None:
        """One tag; None when the execution or the tag is missing."""
        name = validation.text("key", key)
        if refused := tag_rules.check_tag_key(name):
            raise refused
        row = await self._row(execution_id)
        return None if row is None else tag_rules.decode_tags(row.tags).get(name)

    async def read_exec_core_fields(self, partition: int, execution_id: str, names: Sequence[str]) -> dict[str, Any]:
        """The named fields of the core record that are set."""
        execution = validate.validate_execution_id(execution_id)
        wanted = [validation.text("names", name) for name in validate.validate_iterable("names", names)]
        if ids.partition_of(execution) != validate.validate_flow_partition(partition, self.runtime.partitions):
            raise errors.InvalidInput(f"partition: {partition} is not the partition of {execution}")
        row, payload = await self._row_and_payload(execution)
        if row is None or payload is None:
            return {}
        fields = views.core_fields(row, payload)
        return {name: fields[name] for name in wanted if name in fields}

    async def attempt_history(self, execution_id: str) -> list[AttemptView]:
        """Every attempt by index, the running one included."""
        execution = validate.validate_execution_id(execution_id)
        loaded = await self.runtime.load((Read(Execution, (execution,)), Read(Attempt, (execution,))))
        return views.attempt_views(loaded.rows[0][0] if loaded.rows[0] else None, loaded.rows[1])

    async def lease_history(self, execution_id: str) -> list[HistoryEntry]:
        """What happened to the leases of an execution, oldest first; renewals are told in the feed only."""
        execution = validate.validate_execution_id(execution_id)
        row = await self._row(execution)
        if row is None:
            return []
        events = await self.runtime.retry_while_unavailable(
            lambda: self.runtime.store.history(execution, Topic.LEASE, MAX_HISTORY_EVENTS, RENEWED)
        )
        return [_entry(told) for told in views.current_history(row, events)]

    async def list_executions(self, partition: int, *, cursor: str | None = None, limit: int = 50) -> ExecutionPage:
        """Ids of one partition, ascending, strictly after the cursor."""
        place = validate.validate_flow_partition(partition, self.runtime.partitions)
        wanted = min(validation.integer("limit", limit, least=0), MAX_PAGE)
        after = None if cursor is None else (validate.validate_execution_id(cursor),)
        where = (Where("partition", "=", place), Where("execution_id", "starts", f"{{fp:{place}}}:"))
        rows = await self._page(Scan(Execution, where, ("execution_id",), after, wanted + 1), wanted)
        found = [row.execution_id for row in rows[:wanted]]
        return ExecutionPage(found, found[-1] if len(rows) > wanted else None)

    async def search_executions(
        self,
        *,
        namespace: str | None = None,
        lane_id: str | None = None,
        public_state: PublicState | str | None = None,
        flow_id: str | None = None,
        created_from: int | None = None,
        created_before: int | None = None,
        tag: tuple[str, str] | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> SnapshotPage:
        """Executions of all partitions that meet every filter, by id, strictly after the cursor."""
        where: list[Where] = []
        if namespace is not None:
            where.append(Where("namespace", "=", validation.text("namespace", namespace)))
        if lane_id is not None:
            where.append(Where("lane_id", "=", validate.validate_lane_id(lane_id)))
        if public_state is not None:
            where.append(Where("public_state", "=", _public_state(public_state)))
        if flow_id is not None:
            where.append(Where("flow_id", "=", validate.optional_uuid("flow_id", flow_id)))
        if created_from is not None:
            where.append(Where("created_at", ">=", validation.instant_ms("created_from", created_from)))
        if created_before is not None:
            where.append(Where("created_at", "<", validation.instant_ms("created_before", created_before)))
        label = None if tag is None else _tag(tag)
        if label is not None:
            where.append(Where("tags", "set"))
        wanted = min(validation.integer("limit", limit, least=0), MAX_PAGE)
        size = wanted + 1 if label is None else MAX_PAGE + 1
        found: list[Execution] = []
        after: tuple[Any, ...] | None = None if cursor is None else (validate.validate_execution_id(cursor),)
        while wanted:  # no index serves this, and a tag is looked for in what the other filters leave over
            scan = Scan(Execution, tuple(where), ("execution_id",), after, size)
            read = await self.runtime.search(scan, SEARCH_BUDGET)
            found += [
                row for row in read.rows if label is None or tag_rules.decode_tags(row.tags).get(label[0]) == label[1]
            ]
            if (after := read.after) is None or len(found) > wanted:
                break
        page = [views.execution_snapshot(row) for row in found[:wanted]]
        return SnapshotPage(page, page[-1].execution_id if len(found) > wanted and page else None)

    async def find_executions(
        self, prefix: str, *, namespaces: Sequence[str] | None = None, limit: int = 10
    ) -> IdMatches:
        """Executions whose id begins like this, of some namespaces or of all.

        The partition may be left out: 86:019a9f3c and 019a9f3c stand for {fp:86}:019a9f3c. Each partition is one range
        of the index of ids.
        """
        wanted = validation.integer("limit", limit, least=1, most=MAX_MATCHES)
        begins = tuple(ids.id_prefixes(validation.text("prefix", prefix), self.runtime.partitions))
        where: tuple[Where, ...] = (Where("execution_id", "starts", begins),)
        if namespaces is not None:
            own = tuple(
                validation.text("namespaces", one) for one in validate.validate_iterable("namespaces", namespaces)
            )
            where += (Where("namespace", "in", own),)
        rows = await self.runtime.scan(
            Scan(Execution, where, ("execution_id",), limit=wanted + 1, limit_by="execution_id")
        )
        found = [row.execution_id for row in rows]
        return IdMatches(found[:wanted], len(found) > wanted)

    async def list_lanes(self, *, cursor: str | None = None, limit: int = 50) -> LanePage:
        """Lanes that ever had an execution, ascending."""
        after = None if cursor is None else validate.validate_lane_id(cursor)
        wanted = min(validation.integer("limit", limit, least=0), MAX_PAGE)
        if not wanted:
            return LanePage([])
        lanes = await self.runtime.retry_while_unavailable(lambda: self.runtime.store.lanes(after, wanted + 1))
        return LanePage(lanes[:wanted], lanes[wanted - 1] if len(lanes) > wanted else None)

    async def list_expired_leases(
        self,
        *,
        as_of: int,
        after: tuple[int, str] | None = None,
        limit: int = 1000,
        max_partitions_per_call: int = 32,
        namespace: str | None = None,
    ) -> ExpiredLeasePage:
        """Leases whose end had come at `as_of`, marked or not, by end and id; revoked ones are not among them.

        `max_partitions_per_call` may be given and hides nothing: one list serves all partitions here.
        """
        validation.integer("max_partitions_per_call", max_partitions_per_call, least=0)
        wanted = min(validation.integer("limit", limit, least=0), MAX_EXPIRED_PAGE)
        where = [Where("lease_expires_at", "<=", validation.instant_ms("as_of", as_of))]
        if namespace is not None:
            where.append(Where("namespace", "=", validation.text("namespace", namespace)))
        place = None if after is None else _expired_cursor(after)
        order = ("lease_expires_at", "execution_id")
        rows = await self._page(Scan(Execution, tuple(where), order, place, wanted + 1), wanted)
        entries = [
            ExpiredLease(
                row.execution_id,
                row.lease_id or "",
                row.lease_epoch,
                row.worker_instance_id or "",
                row.lease_expires_at or 0,
                row.attempt_index or 0,
            )
            for row in rows[:wanted]
        ]
        more = (entries[-1].expires_at_ms, entries[-1].execution_id) if len(rows) > wanted and entries else None
        return ExpiredLeasePage(entries, more)

    async def _page(self, scan: Scan, wanted: int) -> list[Execution]:
        return await self.runtime.scan(scan) if wanted else []

    async def _row(self, execution_id: str) -> Execution | None:
        loaded = await self.runtime.load((Read(Execution, (validate.validate_execution_id(execution_id),)),))
        return loaded.rows[0][0] if loaded.rows[0] else None

    async def _known(self, execution_id: str) -> Execution:
        row = await self._row(execution_id)
        if row is None:
            raise errors.InvalidInput("execution_id: no such execution")
        return row

    async def _row_and_payload(self, execution_id: str) -> tuple[Execution | None, Payload | None]:
        execution = validate.validate_execution_id(execution_id)
        loaded = await self.runtime.load((Read(Execution, (execution,)), Read(Payload, (execution,))))
        if not loaded.rows[0]:
            return None, None
        return loaded.rows[0][0], loaded.rows[1][0] if loaded.rows[1] else None


def _ended(row: Execution, result: Result | None) -> ExecutionOutcome:
    succeeded = row.terminal_outcome is TerminalOutcome.SUCCESS  # then a reason is that of an earlier attempt
    return ExecutionOutcome(
        row.execution_id,
        row.terminal_outcome,
        result.payload if result else None,
        result.encoding if result else None,
        None if succeeded else row.failure_reason or row.cancellation_reason,
        row.namespace,
    )


def _tag(pair: object) -> tuple[str, str]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise errors.InvalidInput("tag: not a pair of key and value")
    return validation.text("tag", pair[0]), validation.text("tag", pair[1])


def _expired_cursor(pair: object) -> tuple[int, str]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise errors.InvalidInput("after: not a pair of instant and execution id")
    return validation.instant_ms("after", pair[0]), validate.validate_execution_id(pair[1])


def _public_state(value: PublicState | str) -> PublicState:
    try:
        return PublicState(value)
    except ValueError:
        raise errors.InvalidInput(f"public_state: {validation.preview(value)} is no state") from None


def _entry(told: FeedEvent) -> HistoryEntry:
    event = told.event
    fields = {name: getattr(event, name) for name in _HISTORY_FIELDS if getattr(event, name) is not None}
    details = msgspec.json.decode(event.details, type=dict[str, Any]) if event.details else {}
    if event.lease == "reclaimed":
        fields = {
            "old_lease_epoch": details["old_lease_epoch"],
            "new_lease_id": event.lease_id,
            "new_lease_epoch": event.lease_epoch,
            "new_attempt_id": event.attempt_id,
            "new_attempt_index": event.attempt_index,
            "worker_id": event.worker_id,
        }
    elif event.lease == "replay_initiated":
        fields = {name: details[name] for name in ("replay_count", "replay_type")}
    return HistoryEntry(event.lease or "", told.at, fields)
