"""Output of commands: tables for people, JSON for machines, errors with a hint for both."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.model.text import first_line as first_line_of
from flowfabric.model.text import format_instant as format_instant

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from flowfabric import FabricError

TimeoutOption = Annotated[str | None, typer.Option(metavar="LENGTH", help='Wait no longer than this: "30s", "5m".')]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]

# Repeated here as text, so that shell completion loads no engine; a test compares them with the enum.
STATES = (
    *("waiting", "delayed", "rate_limited", "waiting_children", "active", "suspended"),
    *("completed", "failed", "cancelled", "expired", "skipped"),
)
BAR_WIDTH = 20
MIN_LAST_COLUMN_WIDTH = 40  # the last column of a table is at least this wide
INDENT = (0, 0, 0, 2)
SHORT_CELL_CHARS = 20  # longer cells, such as ids and instants, need no column name
PIPE_WIDTH = 200  # wide enough that ids are not cut


def console(*, stderr: bool = False) -> Console:
    """Return a console for tables and colours."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PIPE_WIDTH, highlight=False)


def print_json(value: Any) -> None:
    """Print one JSON document."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def print_json_line(value: Any) -> None:
    """Print one JSON document on one line, as an item of a stream."""
    import msgspec

    typer.echo(msgspec.json.encode(value).decode())


def report(json: bool, text: str, **document: object) -> None:
    """Print a text for people, or with `json` a document."""
    if json:
        print_json(document)
    else:
        typer.echo(text)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; the last column may be wrapped. On a terminal that is too narrow, print a list instead."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    drawn = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns, 1):
        drawn.add_column(name, no_wrap=number < len(columns))
    cells = [[_cell(value) for value in row] for row in rows]
    for row in cells:
        drawn.add_row(*row)
    out = console()
    if not out.is_terminal or _width([columns, *([cell.plain for cell in row] for row in cells)]) <= out.width:
        out.print(drawn)
        return
    if title:
        out.print(title, style="italic")
    for row in cells:
        _print_entry(out, columns, row)
    out.print()


def _width(rows: Sequence[Sequence[str]]) -> int:
    """Return the minimum width of a table."""
    *whole, last = (max(map(len, column)) for column in zip(*rows, strict=True))
    return sum(whole) + min(last, MIN_LAST_COLUMN_WIDTH) + 3 * len(rows[0])


def _cell(value: object) -> Text:
    from rich.text import Text

    return Text("" if value is None else str(value), style=_style(value))


def _print_entry(out: Console, columns: Sequence[str], row: Sequence[Text]) -> None:
    """Print a row as lines: the first cell, and below it the others with their column names."""
    from rich.padding import Padding
    from rich.text import Text

    if row[0].plain:
        out.print(Text.assemble((f"{columns[0]} " if len(row[0].plain) < SHORT_CELL_CHARS else "", "dim"), row[0]))
    line = Text()
    for name, cell in zip(columns[1:], row[1:], strict=True):
        if not cell.plain:
            continue
        piece = Text.assemble((f"{name} ", "dim"), cell)
        if line and len(line) + len(piece) + 4 > out.width:
            out.print(Padding(line, INDENT, expand=False))
            line = Text()
        line = Text.assemble(line, "  ", piece) if line else piece
    if line:
        out.print(Padding(line, INDENT, expand=False))


def first_line(text: str | None) -> str:
    """Return the message of a failure without its traceback; instants are formatted for people."""
    return re.sub(r"\buntil (\d{13})\b", lambda match: f"until {format_instant(int(match[1]))}", first_line_of(text))


_STYLES = {
    "completed": "green",
    "ended_success": "green",
    "active": "cyan",
    "started": "cyan",
    "failed": "red",
    "ended_failure": "red",
    "expired": "red",
    "cancelled": "yellow",
}


def _style(value: object) -> str:
    return _STYLES.get(str(value), "")


def format_progress(progress: Mapping[str, Any]) -> str:
    """Format reported progress, with a bar for its percentage."""
    share = progress.get("pct")
    parts = [f"{_bar(share)} {share} %"] if isinstance(share, int) else []
    parts += [value if name == "message" else f"{name}: {value}" for name, value in progress.items() if name != "pct"]
    return ", ".join(map(str, parts))


def _bar(pct: int) -> str:
    full = round(min(max(pct, 0), 100) * BAR_WIDTH / 100)
    return "━" * full + "╌" * (BAR_WIDTH - full)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Print a FabricError to stderr and exit with its code; any other exception keeps its traceback."""
    from flowfabric.errors import FabricError

    try:
        yield
    except FabricError as error:
        typer.echo(f"ff: {error}", err=True)
        if hint := hint_for(error):
            typer.echo(f"Hint: {hint}", err=True)
        raise typer.Exit(1) from None


def hint_for(error: FabricError) -> str | None:
    """Return a hint for an error, or None."""
    from flowfabric import errors, ids

    match error:
        case errors.SchemaTooNew():
            return "update this installation: pip install --upgrade flowfabric"
        case errors.PartitionMismatch():
            return (
                "set FF_FLOW_PARTITIONS, FF_BUDGET_PARTITIONS and FF_QUOTA_PARTITIONS to the numbers that are stored; "
                "unset is 256, 32 and 32"
            )
        case errors.Unavailable(op="open"):
            return "`ff migrate` makes or updates the store; --store or FLOWFABRIC_URL names another"
        case errors.StoreUnavailable(backend="SQLite"):
            return "is it the right file, and may you write to it and to its folder?"
        case errors.StoreUnavailable(source=errors.StoreFault.AUTH):
            return "are the user and the password in the address right, and may they connect from here?"
        case errors.StoreUnavailable():
            return "is the address right and the server up? --store or FLOWFABRIC_URL names it"
        case errors.RotationConflict():
            return "give the new key a name of its own, or the secret that it had: --secret-file"
        case errors.InvalidToken():
            return "`ff approvals --links` shows the links that are open"
        case errors.Unauthorized():
            return "ask the operator of the server for a token with this right, and set FLOWFABRIC_TOKEN to it"
        case errors.InvalidInput(detail=detail) if detail.startswith("public_state:"):
            return f"the states are {', '.join(STATES)}"
        case errors.NotFound(entity="budget") | ids.InvalidUuid(facts={"field": "budget_id"}):
            return "`ff budgets` shows which budgets there are"
        case errors.NotFound(entity="schedule"):
            return "`ff schedules list` shows which schedules there are"
        case errors.NotFound():
            return "`ff ls` shows which executions there are"
        case errors.ExecutionNotActive():
            return "it has ended already: `ff show` prints its outcome, `ff replay` runs it again"
        case errors.ExecutionNotTerminal():
            return "only an ended execution can be replayed: `ff show` prints its state"
        case ids.MissingTag() | ids.InvalidPartitionIndex() | ids.InvalidUuid() | ids.NotAShortId():
            return (
                "an execution id looks like '{fp:86}:1a255fe9-f16a-4af0-8cb6-6085de2ea47d'; quote it for the shell, or "
                "give its beginning without braces: 86:1a255fe9 or 1a255fe9"
            )
        case _:
            return None
