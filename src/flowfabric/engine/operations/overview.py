"""Reads for people who watch a deployment: levels of lanes, what workers hold, quotas, spending and past events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from flowfabric import errors
from flowfabric.engine.limits.aggregates import LimitAggregates
from flowfabric.engine.metrics.queue_depth import MAX_SHOWN, GaugeReader
from flowfabric.engine.operations.pages import ExecutionListPage
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import limits as validate_limits
from flowfabric.engine.validation.execution_filter import validate_namespaces
from flowfabric.model.event import TOPIC_FIELDS, Event, FeedEvent, Topic
from flowfabric.model.execution import Execution
from flowfabric.model.limits.budget import BudgetReservation, BudgetSpend
from flowfabric.model.limits.quota import QuotaPolicy, QuotaSlot
from flowfabric.model.security.owned_id import DEFAULT_NAMESPACE, NamespacedId
from flowfabric.rules import validation
from flowfabric.rules.execution import views
from flowfabric.rules.limits.quota import QuotaStatus, quota_status
from flowfabric.rules.scheduling.queue_depth import LaneLevels
from flowfabric.stores.queries import FeedPage, Read, Scan, Where

MAX_PAGE = 1000
MAX_HELD = 1000
MAX_EVENTS = 500
FEED_STEP = 1000  # positions of the feed that the first read of past events covers, and events of one read
FEED_READS = 40  # reads of one call
FEED_PAGES = 8  # pages of one read of one topic
FEED_GROWTH = 64  # positions of some stores are instants: a pause of a day is 10^14 of them
FEED_SHRINK = 8


class Levels(msgspec.Struct, frozen=True):
    """The lanes with their unfinished executions and live workers, at an instant of the store."""

    at: int
    lanes: list[LaneLevels]


class Spending(msgspec.Struct, frozen=True):
    """What an execution has spent or reserved in one dimension of a budget since its last reset."""

    namespace: str
    budget_id: str
    dimension: str
    execution_id: str
    amount: int
    reserved: int = 0


class SpendingPage(msgspec.Struct, frozen=True):
    """Spending, and the cursor of the next page."""

    spending: list[Spending]
    next_cursor: str | None = None


class QuotaPage(msgspec.Struct, frozen=True):
    """Quota policies by id, and the cursor of the next page."""

    quotas: list[QuotaStatus]
    next_cursor: str | None = None


class PastEvent(msgspec.Struct, frozen=True):
    """An event of the feed: its position, its time, its topics and what it says."""

    position: int
    at: int
    topics: tuple[Topic, ...]
    event: Event


class EventPage(msgspec.Struct, frozen=True):
    """Events, newest first, and the position that the next page is before; None if there are no older ones."""

    events: list[PastEvent]
    next_before: int | None = None


class Overview:
    """Operations that read across executions."""

    def __init__(self, runtime: Runtime, gauges: GaugeReader, aggregates: LimitAggregates) -> None:
        self.runtime = runtime
        self.gauges = gauges
        self.aggregates = aggregates

    async def read_levels(self) -> Levels:
        """Return how many executions of each lane wait, run, sleep and are blocked, and how many workers serve it."""
        now, lanes = await self.gauges.read_lanes(MAX_SHOWN)
        return Levels(now, lanes)

    async def list_worker_executions(
        self,
        worker_instance_id: str,
        *,
        namespaces: Sequence[str] | None = None,
        limit: int = 100,
    ) -> ExecutionListPage:
        """List the executions whose lease a worker instance holds, the first to expire first."""
        instance = validate.validate_instance_id(worker_instance_id)
        wanted = validate_namespaces(None, namespaces)
        size = validation.integer("limit", limit, least=1, most=MAX_HELD)
        where = [Where("lease_expires_at", "set"), Where("worker_instance_id", "=", instance)]
        if wanted is not None:
            where.append(Where("namespace", "in", wanted))
        rows = await self.runtime.scan(
            Scan(Execution, tuple(where), ("lease_expires_at", "execution_id"), limit=size + 1)
        )
        kinds = await self.runtime.kinds([row.execution_id for row in rows[:size]])
        held = [views.execution_listing(row, kinds.get(row.execution_id, "")) for row in rows[:size]]
        return ExecutionListPage(held, None, len(rows) > size)

    async def read_spending(self, execution_id: str) -> list[Spending]:
        """List what an execution has spent and reserved, by budget and dimension."""
        execution = validate.validate_execution_id(execution_id)
        order = ("namespace", "budget_id", "dimension")
        where = (Where("execution_id", "=", execution),)
        spends: list[BudgetSpend] = await self.runtime.scan(Scan(BudgetSpend, where, order, limit=MAX_PAGE))
        reserved: list[BudgetReservation] = await self.runtime.scan(
            Scan(BudgetReservation, where, (*order, "reservation_id"), limit=MAX_PAGE)
        )
        found: dict[tuple[str, str, str], Spending] = {
            (row.namespace, row.budget_id, row.dimension): _spending(row) for row in spends
        }
        for row in reserved:
            key = (row.namespace, row.budget_id, row.dimension)
            known = found.get(key) or Spending(*key, execution, 0)
            found[key] = msgspec.structs.replace(known, reserved=known.reserved + row.amount)
        return [found[key] for key in sorted(found)]

    async def list_spenders(
        self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE, cursor: str | None = None, limit: int = 100
    ) -> SpendingPage:
        """List who has spent from a budget since its last reset, by execution and dimension, after the cursor."""
        budget = validate_limits.build_owned_id(namespace, budget_id)
        size = validation.integer("limit", limit, least=1, most=MAX_PAGE)
        after = None if cursor is None else (validate.validate_execution_id(cursor), "\U0010ffff")
        where = (Where("namespace", "=", budget.namespace), Where("budget_id", "=", budget.id))
        rows: list[BudgetSpend] = await self.runtime.scan(
            Scan(BudgetSpend, where, ("execution_id", "dimension"), after, size + 1)
        )
        page = rows[:size]
        if len(rows) > size:  # a page holds all dimensions of an execution, unless it is a single one
            whole = [row for row in page if row.execution_id != rows[size].execution_id]
            page = whole or page
        more = page[-1].execution_id if len(rows) > len(page) else None
        return SpendingPage([_spending(row) for row in page], more)

    async def list_quotas(
        self, *, namespace: str = DEFAULT_NAMESPACE, cursor: str | None = None, limit: int = 50
    ) -> QuotaPage:
        """List the quota policies of a namespace by id, with what they admit and who holds their slots."""
        owner = validation.name("namespace", namespace)
        size = validation.integer("limit", limit, least=1, most=MAX_PAGE)
        after = None if cursor is None else (validate.parse_uuid("quota_policy_id", cursor),)
        scan = Scan(QuotaPolicy, (Where("namespace", "=", owner),), ("quota_policy_id",), after, size + 1)
        rows: list[QuotaPolicy] = await self.runtime.scan(scan)
        keys = [NamespacedId(owner, row.quota_policy_id) for row in rows[:size]]
        if not keys:
            return QuotaPage([])
        now, states = await self.aggregates.quotas.load(keys, {key: (Read(QuotaSlot, key),) for key in keys})
        return QuotaPage([quota_status(states[key], now) for key in keys], keys[-1].id if len(rows) > size else None)

    async def list_events(
        self,
        *,
        topics: Sequence[Topic | str] = tuple(Topic),
        namespaces: Sequence[str] | None = None,
        before: int | None = None,
        limit: int = 50,
    ) -> EventPage:
        """List past events, newest first, before a position; renewals of leases are left out."""
        chosen = _topics(topics)
        wanted = validate_namespaces(None, namespaces)
        size = validation.integer("limit", limit, least=1, most=MAX_EVENTS)
        end = await self.runtime.retry_while_unavailable(self.runtime.store.feed_end)
        top = end + 1 if before is None else min(validation.integer("before", before, least=0), end + 1)
        oldest = [event.position for topic in chosen for event in (await self._feed(topic, 0, 1)).events]
        floor = min(oldest, default=top)
        found: dict[int, FeedEvent] = {}
        low, step = top, FEED_STEP
        for _ in range(FEED_READS):
            begin = max(floor, low - step)
            events = await self._events_between(chosen, begin, low)
            if events is None:
                step = max(1, step // FEED_SHRINK)
                continue
            found |= events
            low, step = begin, step * FEED_GROWTH
            if low == floor or sum(_is_wanted(event, wanted) for event in found.values()) >= size:
                break
        matching = sorted((event for event in found.values() if _is_wanted(event, wanted)), key=_newest, reverse=True)
        page = [_past_event(event) for event in matching[:size]]
        is_cut = len(matching) > size
        return EventPage(page, page[-1].position if is_cut else low if low > floor else None)

    async def _events_between(self, topics: list[Topic], low: int, high: int) -> dict[int, FeedEvent] | None:
        """Return the events at positions from `low` to before `high`; None if they are too many for one read."""
        found: dict[int, FeedEvent] = {}
        for events in await asyncio.gather(*(self._topic_between(topic, low, high) for topic in topics)):
            if events is None:
                return None
            found |= {event.position: event for event in events}
        return found

    async def _topic_between(self, topic: Topic, low: int, high: int) -> list[FeedEvent] | None:
        """Return the events of one topic; a store may return fewer at a time than there are."""
        events: list[FeedEvent] = []
        after = max(0, low - 1)
        for _ in range(FEED_PAGES):
            page = await self._feed(topic, after, FEED_STEP)
            events += [event for event in page.events if event.position < high]
            if page.position >= high - 1 or page.position <= after:
                return events
            after = page.position
            if len(events) >= FEED_STEP:
                break
        return None

    async def _feed(self, topic: Topic, after: int, limit: int) -> FeedPage:
        return await self.runtime.retry_while_unavailable(lambda: self.runtime.store.feed(topic, after, limit))


def _spending(row: BudgetSpend) -> Spending:
    return Spending(row.namespace, row.budget_id, row.dimension, row.execution_id, row.amount)


def _topics(values: object) -> list[Topic]:
    if isinstance(values, str) or not isinstance(values, list | tuple) or not values:
        raise errors.InvalidInput("topics: not a list of topics")
    try:
        return list(dict.fromkeys(Topic(value) for value in values))
    except ValueError:
        raise errors.InvalidInput(f"topics: none of {', '.join(Topic)}") from None


def _newest(event: FeedEvent) -> int:
    return event.position


def _is_wanted(entry: FeedEvent, namespaces: tuple[str, ...] | None) -> bool:
    event = entry.event
    if namespaces is not None and event.namespace not in namespaces:
        return False
    return event.lease != "renewed" or event.outcome is not None


def _past_event(entry: FeedEvent) -> PastEvent:
    event = entry.event
    topics = tuple(topic for topic, field in TOPIC_FIELDS.items() if getattr(event, field) is not None)
    return PastEvent(entry.position, entry.at, topics, event)
