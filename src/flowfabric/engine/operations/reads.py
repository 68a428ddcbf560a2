"""Read operations: executions, flows and their history, for people and consoles."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.flows.completion_dispatcher import outgoing_edges, scan_edges
from flowfabric.engine.operations.explainer import Explainer
from flowfabric.engine.operations.overview import EventPage, Levels, Overview, QuotaPage, Spending, SpendingPage
from flowfabric.engine.operations.pages import (
    ExecutionListPage,
    ExecutionOutcome,
    ExecutionPage,
    ExpiredLease,
    ExpiredLeasePage,
    FlowPage,
    HistoryEntry,
    IdMatches,
    LanePage,
)
from flowfabric.engine.operations.search import ExecutionSearch
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.read_set import ReadSet, load_each, load_many, load_one
from flowfabric.engine.runtime.recent_creates import RecentCreates
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.wakeups import completion_topic, wait_for_wakeup
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation.execution_filter import validate_filter
from flowfabric.ids import parse_execution_id
from flowfabric.model.answers.execution import AttemptView
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import Attempt, Execution, Payload, Result
from flowfabric.model.failure import read_failure
from flowfabric.model.flow import Edge, EdgeGroup, Flow, FlowMember, FlowSummary
from flowfabric.model.obstacles import Explanation
from flowfabric.model.security.owned_id import DEFAULT_NAMESPACE
from flowfabric.model.states import LifecyclePhase, PublicState, TerminalOutcome
from flowfabric.model.suspension import Suspension
from flowfabric.rules import validation
from flowfabric.rules.durable import mailbox
from flowfabric.rules.execution import tags as tag_rules
from flowfabric.rules.execution import views
from flowfabric.rules.flow import views as flow_views
from flowfabric.rules.flow.build import EdgeSnapshot, edge_snapshot
from flowfabric.rules.flow.views import FlowSnapshot
from flowfabric.stores.queries import Scan, Where

FIRST_CHECK_DELAY_S = 0.02  # the time for which the completion of a new execution is awaited before a load
MAX_MEMBERS_PER_LOAD = 500
MAX_PAGE = 1000
MAX_EXPIRED_PAGE = 10_000
MAX_HISTORY_EVENTS = 1000
RENEWED = "renewed"  # left out: so frequent that it would displace all other events of a long execution
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

    overview: Overview
    execution_search: ExecutionSearch
    runtime: Runtime
    explainer: Explainer
    recent_creates: RecentCreates

    async def explain(self, execution_id: str) -> Explanation:
        """Explain why an execution is not running."""
        return await self.explainer.explain(validate.validate_execution_id(execution_id))

    async def await_end(self, execution_id: str, *, max_wait_ms: int = 0) -> ExecutionOutcome | None:
        """Wait for the execution to end and return its outcome; None if it does not end in time."""
        execution = parse_execution_id(validation.text("execution_id", execution_id))
        clock = asyncio.get_running_loop().time
        until = clock() + validation.duration_ms("max_wait_ms", max_wait_ms, least=0) / 1000
        reads = ReadSet()
        row, result = reads.one(Execution, execution), reads.one(Result, execution)
        is_new = self.recent_creates.take(execution)
        while True:
            hint = self.runtime.wakeups.subscribe(completion_topic(execution))
            try:
                if is_new and until > clock():  # a load now would find nothing and delay the worker
                    is_new = False
                    await asyncio.wait((hint,), timeout=min(FIRST_CHECK_DELAY_S, until - clock()))
                    if not hint.done() and execution in self.runtime._lease_cache:  # its end here wakes this task up
                        await asyncio.wait((hint,), timeout=min(self.runtime.poll_interval_s, until - clock()))
                rows = (await self.runtime.load(reads)).rows
                found = row(rows)
                if found is None:
                    raise errors.NotFound("execution", execution_id=execution)
                if found.lifecycle_phase is LifecyclePhase.TERMINAL:
                    return _outcome(found, result(rows))
                left = until - clock()
                if left <= 0:
                    return None
                await wait_for_wakeup(hint, min(left, self.runtime.poll_interval_s))
            finally:
                hint.cancel()

    async def describe_flow(self, flow_id: str) -> FlowSnapshot | None:
        """Return the flow with its joins; None if there is none."""
        flow_id = validate.validate_flow_id(flow_id)
        reads = ReadSet()
        flow, groups = reads.one(Flow, flow_id), reads.many(EdgeGroup, flow_id)
        rows = (await self.runtime.load(reads)).rows
        found = flow(rows)
        return None if found is None else flow_views.flow_snapshot(found, groups(rows))

    async def list_flows(self, partition: int | str, *, cursor: str | None = None, limit: int = 50) -> FlowPage:
        """List the flows of one partition (its number or its key) by id, after the cursor."""
        index = validate.validate_flow_partition(partition, self.runtime.partitions)
        size = min(validation.integer("limit", limit, least=0), MAX_PAGE)
        after = None if cursor is None else (index, validate.validate_flow_id(cursor))
        if not size:
            return FlowPage([])
        where = (Where("partition", "=", index),)
        rows = await self.runtime.store.scan(Scan(Flow, where, ("partition", "flow_id"), after, size + 1))
        page = [flow_views.flow_status(row) for row in rows[:size]]
        return FlowPage(page, page[-1].flow_id if len(rows) > size else None)

    async def list_flow_members(self, flow_id: str) -> list[str]:
        """List every member that was ever added, ascending."""
        members = await load_many(self.runtime, FlowMember, validate.validate_flow_id(flow_id))
        return [member.execution_id for member in members]

    async def list_outgoing_edges(self, flow_id: str, execution_id: str) -> list[EdgeSnapshot]:
        """List the outgoing edges of an execution by id."""
        flow, upstream = validate.validate_flow_id(flow_id), validate.validate_execution_id(execution_id)
        return [edge_snapshot(edge) for edge in await outgoing_edges(self.runtime, [upstream]) if edge.flow_id == flow]

    async def list_incoming_edges(self, flow_id: str, execution_id: str) -> list[EdgeSnapshot]:
        """List the incoming edges of an execution by id."""
        flow, downstream = validate.validate_flow_id(flow_id), validate.validate_execution_id(execution_id)
        found = await scan_edges(self.runtime, "downstream_execution_id", [downstream])
        return [edge_snapshot(edge) for edge in found if edge.flow_id == flow]

    async def list_edges(
        self, flow_id: str, *, outgoing: str | None = None, incoming: str | None = None
    ) -> list[EdgeSnapshot]:
        """List the outgoing or the incoming edges of one execution."""
        if (outgoing is None) == (incoming is None):
            raise errors.InvalidInput("edges are listed either outgoing from or incoming to one execution")
        if outgoing is not None:
            return await self.list_outgoing_edges(flow_id, outgoing)
        return await self.list_incoming_edges(flow_id, incoming or "")

    async def describe_edge(self, flow_id: str, edge_id: str) -> EdgeSnapshot | None:
        """Return an edge; None if this flow has no such edge."""
        edge = await load_one(
            self.runtime, Edge, validate.validate_flow_id(flow_id), validate.parse_uuid("edge_id", edge_id)
        )
        return None if edge is None else edge_snapshot(edge)

    async def resolve_execution_flow_id(self, execution_id: str) -> str | None:
        """Return the flow of an execution; None if it has none or does not exist."""
        row = await self._row(execution_id)
        return None if row is None else row.flow_id

    async def get_flow_tag(self, flow_id: str, key: str) -> str | None:
        """Return one tag; None if the flow or the tag is missing."""
        if refused := tag_rules.check_tag_key(validation.text("key", key)):
            raise refused
        flow = await load_one(self.runtime, Flow, validate.validate_flow_id(flow_id))
        return None if flow is None else flow_views.tags_of(flow).get(key)

    async def get_flow_summary(self, flow_id: str) -> FlowSummary | None:
        """Return the summary that was last projected; None before the first projection."""
        return await load_one(self.runtime, FlowSummary, validate.validate_flow_id(flow_id))

    async def project_flow_summary(self, flow_id: str) -> bool:
        """Count the members of a flow and write its summary; False if there is nothing to count."""
        flow_id = validate.validate_flow_id(flow_id)
        reads = ReadSet()
        flow, members = reads.one(Flow, flow_id), reads.many(FlowMember, flow_id)
        executions = reads.more_many(Execution)

        async def load_members(rows: Rows) -> Rows:
            names = [member.execution_id for member in members(rows)]
            found: list[Execution] = []
            for start in range(0, len(names), MAX_MEMBERS_PER_LOAD):
                batch = ((name,) for name in names[start : start + MAX_MEMBERS_PER_LOAD])
                found += [row for row in await load_each(self.runtime, Execution, batch) if row is not None]
            return [found]

        return await self.runtime.decide_and_commit(
            reads,
            lambda rows, _: flow_views.project_summary(flow(rows), len(members(rows)), executions(rows)),
            load_more=load_members,
        )

    async def describe_execution(self, execution_id: str) -> views.ExecutionSnapshot | None:
        """Return the execution for display; None if there is none, `Corruption` if its row cannot be decoded."""
        try:
            execution, reads = validate.validate_execution_id(execution_id), ReadSet()
            row, root = reads.one(Execution, execution), reads.one(Suspension, execution)
            rows = (await self.runtime.load(reads)).rows
            found = row(rows)
            return None if found is None else views.execution_snapshot(found, mailbox.unread(root(rows)))
        except errors.Corruption as fault:
            raise errors.Corruption(f"describe_execution: {fault.detail}", execution_id=execution_id) from fault

    async def read_execution_info(self, execution_id: str) -> views.ExecutionInfo | None:
        """Return the execution for the API; None if there is none."""
        row, payload = await self._row_and_payload(execution_id)
        return None if row is None or payload is None else views.execution_info(row, payload)

    async def read_execution_state(self, execution_id: str) -> PublicState | None:
        """Return the public state."""
        row = await self._row(execution_id)
        return None if row is None else row.public_state

    async def read_state_vector(self, execution_id: str) -> views.StateVector | None:
        """Return the seven dimensions of the state."""
        row = await self._row(execution_id)
        return None if row is None else views.make_state_vector(row)

    async def read_results(
        self, execution_ids: Sequence[str], *, namespace: str | None = None
    ) -> dict[str, bytes | None]:
        """Return the results of many executions in one round trip; None for one that has none.

        With a `namespace`, an execution of another one is a conflict.
        """
        executions = [
            validate.validate_execution_id(execution)
            for execution in validate.validate_iterable("execution_ids", execution_ids)
        ]
        validation.optional_text("namespace", namespace)
        if not executions:
            return {}
        reads = ReadSet()
        results = reads.each(Result, ((name,) for name in executions))
        owners = reads.each(Execution, ((name,) for name in executions if namespace is not None))
        rows = (await self.runtime.load(reads)).rows
        for row in owners(rows):
            if row is not None and row.namespace != namespace:
                raise errors.IdInOtherNamespace(execution_id=row.execution_id)
        found = zip(executions, results(rows), strict=True)
        return {name: None if result is None or result.is_failure else result.payload for name, result in found}

    async def get_execution_result(self, execution_id: str) -> bytes | None:
        """Return the result's exact bytes; None until one is stored."""
        result = await load_one(self.runtime, Result, validate.validate_execution_id(execution_id))
        return None if result is None or result.is_failure else result.payload

    async def read_execution_context(self, execution_id: str) -> views.ExecutionContext:
        """Return the input, kind and tags that a handler starts with."""
        row, payload = await self._row_and_payload(execution_id)
        if row is None or payload is None:
            raise errors.InvalidInput("execution_id: no such execution")
        return views.ExecutionContext(
            payload.input_payload or b"", payload.execution_kind, tag_rules.decode_tags(row.tags)
        )

    async def read_input(self, execution_id: str) -> views.ExecutionInput:
        """Return the input of an execution, its kind and its policy."""
        payload = await load_one(self.runtime, Payload, validate.validate_execution_id(execution_id))
        if payload is None:
            raise errors.NotFound("execution", execution_id=execution_id)
        return views.execution_input(payload)

    async def read_current_attempt_index(self, execution_id: str) -> int:
        """Return the index of the latest attempt; 0 before the first claim."""
        return (await self._known(execution_id)).attempt_index or 0

    async def read_total_attempt_count(self, execution_id: str) -> int:
        """Return the index of the next new attempt."""
        return (await self._known(execution_id)).total_attempt_count

    async def read_progress(self, execution_id: str) -> tuple[int | None, str | None]:
        """Return the progress that was last reported: percentage and message."""
        row = await self._row(execution_id)
        if row is None:
            raise errors.NotFound("execution", execution_id=execution_id)
        return row.progress_pct, row.progress_message

    async def get_execution_namespace(self, execution_id: str) -> str | None:
        """Return the namespace; None if there is no such execution."""
        row = await self._row(execution_id)
        return None if row is None else row.namespace

    async def get_execution_tag(self, execution_id: str, key: str) -> str | None:
        """Return one tag; None if the execution or the tag is missing."""
        name = validation.text("key", key)
        if refused := tag_rules.check_tag_key(name):
            raise refused
        row = await self._row(execution_id)
        return None if row is None else tag_rules.decode_tags(row.tags).get(name)

    async def read_exec_core_fields(self, partition: int, execution_id: str, names: Sequence[str]) -> dict[str, Any]:
        """Return those of the named fields of the execution that are set."""
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
        """List every attempt by index, the running one included."""
        execution = validate.validate_execution_id(execution_id)
        reads = ReadSet()
        row, attempts = reads.one(Execution, execution), reads.many(Attempt, execution)
        rows = (await self.runtime.load(reads)).rows
        return views.attempt_views(row(rows), attempts(rows))

    async def lease_history(self, execution_id: str) -> list[HistoryEntry]:
        """List the lease events of an execution, oldest first; renewals are in the feed only."""
        execution = validate.validate_execution_id(execution_id)
        row = await self._row(execution)
        if row is None:
            return []
        events = await self.runtime.retry_while_unavailable(
            lambda: self.runtime.store.history(execution, Topic.LEASE, MAX_HISTORY_EVENTS, RENEWED)
        )
        return [_history_entry(event) for event in views.current_history(row, events)]

    async def list_executions(self, partition: int, *, cursor: str | None = None, limit: int = 50) -> ExecutionPage:
        """List the ids of one partition, ascending, after the cursor."""
        index = validate.validate_flow_partition(partition, self.runtime.partitions)
        size = min(validation.integer("limit", limit, least=0), MAX_PAGE)
        after = None if cursor is None else (validate.validate_execution_id(cursor),)
        where = (Where("partition", "=", index), Where("execution_id", "starts", f"{{fp:{index}}}:"))
        rows = await self._page(Scan(Execution, where, ("execution_id",), after, size + 1), size)
        found = [row.execution_id for row in rows[:size]]
        return ExecutionPage(found, found[-1] if len(rows) > size else None)

    async def list_lanes(self, *, cursor: str | None = None, limit: int = 50) -> LanePage:
        """List the lanes that ever had an execution, ascending."""
        after = None if cursor is None else validate.validate_lane_id(cursor)
        size = min(validation.integer("limit", limit, least=0), MAX_PAGE)
        if not size:
            return LanePage([])
        lanes = await self.runtime.retry_while_unavailable(lambda: self.runtime.store.lanes(after, size + 1))
        return LanePage(lanes[:size], lanes[size - 1] if len(lanes) > size else None)

    async def list_expired_leases(
        self,
        *,
        as_of: int,
        after: tuple[int, str] | None = None,
        limit: int = 1000,
        max_partitions_per_call: int = 32,
        namespace: str | None = None,
    ) -> ExpiredLeasePage:
        """List the leases that had expired at `as_of`, marked or not, by expiry and id; revoked ones are left out.

        `max_partitions_per_call` has no effect: one index covers all partitions.
        """
        validation.integer("max_partitions_per_call", max_partitions_per_call, least=0)
        size = min(validation.integer("limit", limit, least=0), MAX_EXPIRED_PAGE)
        where = [Where("lease_expires_at", "<=", validation.instant_ms("as_of", as_of))]
        if namespace is not None:
            where.append(Where("namespace", "=", validation.text("namespace", namespace)))
        position = None if after is None else _expired_cursor(after)
        order = ("lease_expires_at", "execution_id")
        rows = await self._page(Scan(Execution, tuple(where), order, position, size + 1), size)
        entries = [
            ExpiredLease(
                row.execution_id,
                row.lease_id or "",
                row.lease_epoch,
                row.worker_instance_id or "",
                row.lease_expires_at or 0,
                row.attempt_index or 0,
            )
            for row in rows[:size]
        ]
        more = (entries[-1].expires_at_ms, entries[-1].execution_id) if len(rows) > size and entries else None
        return ExpiredLeasePage(entries, more)

    async def _page(self, scan: Scan, size: int) -> list[Execution]:
        return await self.runtime.scan(scan) if size else []

    async def _row(self, execution_id: str) -> Execution | None:
        return await load_one(self.runtime, Execution, validate.validate_execution_id(execution_id))

    async def _known(self, execution_id: str) -> Execution:
        row = await self._row(execution_id)
        if row is None:
            raise errors.InvalidInput("execution_id: no such execution")
        return row

    async def _row_and_payload(self, execution_id: str) -> tuple[Execution | None, Payload | None]:
        execution = validate.validate_execution_id(execution_id)
        reads = ReadSet()
        row, payload = reads.one(Execution, execution), reads.one(Payload, execution)
        rows = (await self.runtime.load(reads)).rows
        return row(rows), payload(rows)

    async def search_executions(
        self,
        *,
        namespace: str | None = None,
        namespaces: Sequence[str] | None = None,
        kind: str | None = None,
        public_state: PublicState | str | Sequence[PublicState | str] | None = None,
        lane_id: str | None = None,
        tag: tuple[str, str] | None = None,
        flow_id: str | None = None,
        parent_id: str | None = None,
        worker_instance_id: str | None = None,
        error: str | None = None,
        created_from: int | None = None,
        created_before: int | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> ExecutionListPage:
        """List executions of all partitions that match every filter, newest first, after the cursor.

        A page that is not full and has a cursor is incomplete: what matches is rarer than one call reads.
        """
        wanted = validate_filter(
            namespace=namespace,
            namespaces=namespaces,
            kind=kind,
            public_state=public_state,
            lane_id=lane_id,
            tag=tag,
            flow_id=flow_id,
            parent_id=parent_id,
            worker_instance_id=worker_instance_id,
            error=error,
            created_from=created_from,
            created_before=created_before,
        )
        return await self.execution_search.search(wanted, cursor, limit)

    async def list_children(
        self, execution_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> ExecutionListPage:
        """List the executions whose parent this is, oldest first, after the cursor."""
        return await self.execution_search.list_children(execution_id, cursor=cursor, limit=limit)

    async def read_kinds(self, execution_ids: Iterable[str]) -> dict[str, str]:
        """Return the kinds of these executions in one round trip; a missing execution is left out."""
        return await self.execution_search.read_kinds(execution_ids)

    async def find_executions(
        self, prefix: str, *, namespaces: Sequence[str] | None = None, limit: int = 10
    ) -> IdMatches:
        """Find executions by a prefix of their id, in some namespaces or in all.

        The partition may be omitted: 86:019a9f3c and 019a9f3c match {fp:86}:019a9f3c. Each partition is one range scan
        of the id index.
        """
        return await self.execution_search.find_executions(prefix, namespaces=namespaces, limit=limit)

    async def read_levels(self) -> Levels:
        """Return how many executions of each lane wait, run, sleep and are blocked, and how many workers serve it.

        They are counted through indexes, up to a bound: a count that equals it means at least that many.
        """
        return await self.overview.read_levels()

    async def list_worker_executions(
        self,
        worker_instance_id: str,
        *,
        namespaces: Sequence[str] | None = None,
        limit: int = 100,
    ) -> ExecutionListPage:
        """List the executions whose lease a worker instance holds, the first to expire first."""
        return await self.overview.list_worker_executions(worker_instance_id, namespaces=namespaces, limit=limit)

    async def read_spending(self, execution_id: str) -> list[Spending]:
        """List what an execution has spent and reserved, by budget and dimension."""
        return await self.overview.read_spending(execution_id)

    async def list_spenders(
        self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE, cursor: str | None = None, limit: int = 100
    ) -> SpendingPage:
        """List who has spent from a budget since its last reset, by execution and dimension, after the cursor."""
        return await self.overview.list_spenders(budget_id, namespace=namespace, cursor=cursor, limit=limit)

    async def list_quotas(
        self, *, namespace: str = DEFAULT_NAMESPACE, cursor: str | None = None, limit: int = 50
    ) -> QuotaPage:
        """List the quota policies of a namespace by id, with what they admit and who holds their slots."""
        return await self.overview.list_quotas(namespace=namespace, cursor=cursor, limit=limit)

    async def list_events(
        self,
        *,
        topics: Sequence[Topic | str] = tuple(Topic),
        namespaces: Sequence[str] | None = None,
        before: int | None = None,
        limit: int = 50,
    ) -> EventPage:
        """List past events, newest first, before a position; renewals of leases are left out.

        A page that is not full and has a next position is incomplete: few of the events that were read belong to these
        topics and namespaces.
        """
        return await self.overview.list_events(topics=topics, namespaces=namespaces, before=before, limit=limit)


def _outcome(row: Execution, result: Result | None) -> ExecutionOutcome:
    succeeded = row.terminal_outcome is TerminalOutcome.SUCCESS  # then a stored reason is of an earlier attempt
    return ExecutionOutcome(
        row.execution_id,
        row.terminal_outcome,
        result.payload if result and succeeded else None,
        result.encoding if result and succeeded else None,
        None if succeeded else row.failure_reason or row.cancellation_reason,
        row.namespace,
        read_failure(result.payload) if result and result.is_failure else None,
    )


def _expired_cursor(pair: object) -> tuple[int, str]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise errors.InvalidInput("after: not a pair of instant and execution id")
    return validation.instant_ms("after", pair[0]), validate.validate_execution_id(pair[1])


def _history_entry(feed_event: FeedEvent) -> HistoryEntry:
    event = feed_event.event
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
    elif "unread" in details:
        fields["unread"] = details["unread"]
    return HistoryEntry(event.lease or "", feed_event.at, fields)
