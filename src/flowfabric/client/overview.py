"""Reads across executions over HTTP: levels, workers, quotas, spending, flows and past events."""

from __future__ import annotations

from collections.abc import Sequence

from flowfabric.api.durable import CountHeldResponse
from flowfabric.client.base import ClientBase, execution_path, refuse_namespaces
from flowfabric.client.transport import quote_segment
from flowfabric.engine.durable.held_runs import OldWays
from flowfabric.engine.operations.overview import EventPage, Levels, QuotaPage, Spending, SpendingPage
from flowfabric.engine.operations.pages import ExecutionListPage, FlowListPage
from flowfabric.ids import parse_uuid
from flowfabric.model.event import Topic
from flowfabric.model.scheduling.worker import TaskList, WorkerEvent
from flowfabric.model.security.owned_id import DEFAULT_NAMESPACE


class ClientOverview(ClientBase):
    """Operations that read across executions."""

    async def read_levels(self) -> Levels:
        return await self.transport.fetch(Levels, "GET", "/v1/levels")

    async def list_worker_executions(
        self, worker_instance_id: str, *, namespaces: Sequence[str] | None = None, limit: int = 100
    ) -> ExecutionListPage:
        refuse_namespaces(namespaces)
        path = f"/v1/workers/{quote_segment(worker_instance_id)}/executions"
        return await self.transport.fetch(ExecutionListPage, "GET", path, query={"limit": limit})

    async def list_tasks(self, *, namespace: str | None = None, namespaces: Sequence[str] | None = None) -> TaskList:
        refuse_namespaces(namespaces)
        query = {"namespace": namespace}
        return await self.transport.fetch(TaskList, "GET", "/v1/tasks", query=query)

    async def read_spending(self, execution_id: str) -> list[Spending]:
        return (await self.transport.fetch(SpendingPage, "GET", execution_path(execution_id, "spending"))).spending

    async def list_spenders(
        self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE, cursor: str | None = None, limit: int = 100
    ) -> SpendingPage:
        path = f"/v1/budgets/{quote_segment(parse_uuid(budget_id, 'budget_id'))}/spenders"
        query = {"namespace": namespace, "cursor": cursor, "limit": limit}
        return await self.transport.fetch(SpendingPage, "GET", path, query=query)

    async def list_quotas(
        self, *, namespace: str = DEFAULT_NAMESPACE, cursor: str | None = None, limit: int = 50
    ) -> QuotaPage:
        query = {"namespace": namespace, "cursor": cursor, "limit": limit}
        return await self.transport.fetch(QuotaPage, "GET", "/v1/quotas", query=query)

    async def list_events(
        self,
        *,
        topics: Sequence[Topic | str] = tuple(Topic),
        namespaces: Sequence[str] | None = None,
        before: int | None = None,
        limit: int = 50,
    ) -> EventPage:
        refuse_namespaces(namespaces)
        query = {"topics": ",".join(topics), "before": before, "limit": limit}
        return await self.transport.fetch(EventPage, "GET", "/v1/events", query=query)

    async def search_flows(
        self,
        *,
        namespace: str | None = None,
        namespaces: Sequence[str] | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> FlowListPage:
        refuse_namespaces(namespaces)
        query = {"namespace": namespace, "cursor": cursor, "limit": limit}
        return await self.transport.fetch(FlowListPage, "GET", "/v1/flows/search", query=query)

    async def list_worker_events(self, namespace: str, worker_instance_id: str) -> list[WorkerEvent]:
        path = f"/v1/workers/{quote_segment(worker_instance_id)}/events"
        return await self.transport.fetch(list[WorkerEvent], "GET", path, query={"namespace": namespace})

    async def count_held(self, *, namespaces: Sequence[str] | None = None) -> dict[str, int]:
        refuse_namespaces(namespaces)
        return (await self.transport.fetch(CountHeldResponse, "GET", "/v1/held")).held

    async def count_old_ways(self, *, namespaces: Sequence[str] | None = None, cursor: str | None = None) -> OldWays:
        refuse_namespaces(namespaces)
        return await self.transport.fetch(OldWays, "GET", "/v1/old-ways", query={"cursor": cursor})
