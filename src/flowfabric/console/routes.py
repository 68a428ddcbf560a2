"""The routes of the console: static files, which other pages use, too, and the pages themselves."""

from flowfabric.console import (  # noqa: F401 - to import a module registers its pages
    access,
    approvals,
    budgets,
    bulk,
    events,
    flows,
    lanes,
    live,
    login,
    overview,
    run,
    runs,
    schedules,
    store,
    submit,
)
from flowfabric.console.pages import routes as page_routes
from flowfabric.console.paper import routes as static_routes

__all__ = ["page_routes", "static_routes"]
