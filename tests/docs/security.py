"""The table of routes in docs/security.md, made of the server's own table.

python -m tests.docs.security      writes it anew
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
    """Every operation, in the order of the server's table."""
    return "\n".join([HEAD, *(_line(operation) for page in ROUTE_GROUPS for operation in page.entries)])


def kept() -> str:
    """The table that the page has."""
    _, _, rest = PAGE.read_text().partition(f"{BEGIN}\n")
    return rest.partition(f"\n{END}")[0]


def _line(operation: Route) -> str:
    scope = operation.scope.value if operation.scope else "any token" if operation.needs_token else "–"
    cells = (
        operation.method,
        f"`{operation.path}`",
        scope,
        _namespace(operation),
        "yes" if operation.is_audited else "",
    )
    return f"| {' | '.join(cells)} |"


def _namespace(operation: Route) -> str:
    """What a token that is bound to namespaces is checked against."""
    if operation.scope is None:
        return "–"
    return "unbound tokens only" if operation.subject is None else NAMESPACES[operation.subject]


def main() -> None:
    """Write the table into its page."""
    before, _, rest = PAGE.read_text().partition(f"{BEGIN}\n")
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
