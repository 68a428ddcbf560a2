"""The routes of the server, one module per resource."""

from flowfabric.server.routes import (
    admin,
    approval_pages,
    budgets,
    client,
    durable,
    events,
    executions,
    flows,
    grants,
    health,
    lease_usage,
    queries,
    signals,
    streams,
    workers,
)

ROUTE_GROUPS = (
    health.routes,
    executions.routes,
    queries.routes,
    signals.routes,
    streams.routes,
    grants.routes,
    flows.routes,
    budgets.routes,
    workers.routes,
    lease_usage.routes,
    durable.routes,
    client.routes,
    events.routes,
    approval_pages.routes,
    admin.routes,
)
