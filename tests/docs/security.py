"""Generates the table of routes in docs/security.md from the server's routes.

python -m tests.docs.security      writes the table
"""

from __future__ import annotations

from flowfabric.server.routes import ROUTE_GROUPS
from flowfabric.server.routing import Route, Subject
from tests.postgres_install import ROOT

PAGE = ROOT / "docs" / "security.md"
BEGIN, END = "<!-- routes: written by ./dev py -m tests.docs.security -->", "<!-- end of routes -->"
HEAD = "| | route | scope | namespace | audited |\n|---|---|---|---|---|"
NAMESPACES = {
    Subject.EXECUTION: "execution in the path",
    Subject.FLOW: "flow in the path",
    Subject.HANDLE: "execution of the handle",
    Subject.CHECKED_BY_HANDLER: "whatever it names",
}


def table() -> str:
    """Return the table of all routes, in the order of the server."""
    return "\n".join([HEAD, *(_line(operation) for page in ROUTE_GROUPS for operation in page.entries)])


def stored_table() -> str:
    """Return the table in the page."""
    _, _, rest = PAGE.read_text().partition(f"{BEGIN}\n")
    return rest.partition(f"\n{END}")[0]


def _line(operation: Route) -> str:
    scope = operation.scope.value if operation.scope else "any token" if operation.needs_token else "–"
    cells = (
        operation.method,
        f"`{operation.path}`",
        scope,
        _namespace(operation),
        "yes" if operation.audit else "",
    )
    return f"| {' | '.join(cells)} |"


def _namespace(operation: Route) -> str:
    """Return what the namespaces of a bound token are checked against."""
    if operation.scope is None:
        return "–"
    return "unbound tokens only" if operation.subject is None else NAMESPACES[operation.subject]


def main() -> None:
    """Write the table into its page."""
    before, _, rest = PAGE.read_text().partition(f"{BEGIN}\n")
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
