"""Names of columns in the source are columns of the row that they are for, and literal values fit them."""

from __future__ import annotations

from collections import Counter
from textwrap import dedent

import pytest

from tests.model.column_names import Source, mistakes, read_sources
from tests.postgres_install import ROOT


def test_every_column_that_the_source_names_exists_and_holds_what_is_written_to_it() -> None:
    source = Source(read_sources(ROOT / "src"))

    assert mistakes(source) == []
    places = Counter(found.place for found in source.found)
    assert places["patch"] > 200
    assert places["scan"] > 150
    assert places["draft"] > 80
    assert places["guard"] > 10


# Each: a page with a slip in its last line, and what is reported.
SLIPS = {
    "a patch": (
        """
        Patch(Execution, key, {"revision": 1, "purge_att": NOW})
        """,
        "Execution has no column 'purge_att' (in a patch)",
    ),
    "a patch by way of functions": (
        """
        def patch(row, fields):
            return Patch(ApiToken, row.key, fields)
        def digest_fields(row):
            fields = dict(digest="")
            fields["previous_until"] = None
            return fields
        def revoke(row):
            return patch(row, digest_fields(row) | {"revokd_at": NOW})
        """,
        "ApiToken has no column 'revokd_at' (in a patch)",
    ),
    "the condition of a patch": (
        """
        Patch(Stream, key, fields, unless_set="closd_at")
        """,
        "Stream has no column 'closd_at' (in a patch)",
    ),
    "a guard": (
        """
        def guard(child):
            return expect(EdgeGroup, EXPECTED, child)
        EXPECTED = Expected({"n": 1}, per_row=("k", "polcy_variant"))
        """,
        "EdgeGroup has no column 'polcy_variant' (in a guard)",
    ),
    "a template": (
        """
        RowTemplate(Execution, {"rank": NOW, "line": ColumnRef("lin")}, event)
        """,
        "Execution has no column 'lin' (in a template)",
    ),
    "a row that a template is made from": (
        """
        def as_known(known):
            return Execution(**{name: ColumnRef(name) for name in names} | known)
        as_known({"parnt_id": None})
        """,
        "Execution has no column 'parnt_id' (in a draft)",
    ),
    "a scan": (
        """
        def scan(where):
            return Scan(Waitpoint, (*where, Where("closed_at", "unset")), ("waitpoint_id",))
        scan([Where("executon_id", "=", name)])
        """,
        "Waitpoint has no column 'executon_id' (in a scan)",
    ),
    "the order of a scan": (
        """
        Scan(Flow, (), order=("partition", "flow"))
        """,
        "Flow has no column 'flow' (in a scan)",
    ),
    "a condition of a scan that is made elsewhere": (
        """
        Where("eligible", "set")
        """,
        "no row has a column 'eligible' (in a scan)",
    ),
    "a draft": (
        """
        def close(waitpoint: Waitpoint | None):
            return replace(waitpoint, closed_at=NOW, closed_reason="")
        """,
        "Waitpoint has no column 'closed_reason' (in a draft)",
    ),
    "a value of another enum": (
        """
        Patch(Flow, key, {"public_flow_state": TerminalOutcome.CANCELLED})
        """,
        "Flow.public_flow_state does not hold TerminalOutcome.CANCELLED (in a patch)",
    ),
    "an instant in a text": (
        """
        Patch(OutboxMessage, key, {"body": FromNow(5) if later else ""})
        """,
        "OutboxMessage.body does not hold an instant (in a patch)",
    ),
    "nothing where a value is needed": (
        """
        Patch(Execution, key, {"has_waits": None})
        """,
        "Execution.has_waits does not hold None (in a patch)",
    ),
}


@pytest.mark.parametrize(("page", "report"), SLIPS.values(), ids=SLIPS)
def test_a_slip_is_reported_with_its_line_row_and_column(page: str, report: str) -> None:
    text = dedent(page).strip()
    last = text.count("\n") + 1

    assert mistakes(Source({"flowfabric/rules/page.py": text})) == [f"flowfabric/rules/page.py:{last}: {report}"]
