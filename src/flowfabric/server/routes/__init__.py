"""The routes, a page for each resource."""

from flowfabric.server.routes import (
    admin,
    apps,
    budgets,
    claims,
    durable,
    executions,
    feeds,
    flows,
    health,
    lookups,
    signals,
    spending,
    streams,
    waitpoint_pages,
    workers,
)

PAGES = (
    health.routes,
    executions.routes,
    lookups.routes,
    signals.routes,
    streams.routes,
    claims.routes,
    flows.routes,
    budgets.routes,
    workers.routes,
    spending.routes,
    durable.routes,
    apps.routes,
    feeds.routes,
    waitpoint_pages.routes,
    admin.routes,
)
