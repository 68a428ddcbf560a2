"""How a command talks: tables for people, one document for machines, errors with a hint for both."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from flowfabric import FabricError

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]

# In words here, so that shell completion loads no engine; a test compares them.
STATES = (
    *("waiting", "delayed", "rate_limited", "waiting_children", "active", "suspended"),
    *("completed", "failed", "cancelled", "expired", "skipped"),
)
WIDTH_OF_A_BAR = 20
WIDTH_OF_A_PIPE = 200  # nobody folds lines there, and ids should stay whole


def console(*, stderr: bool = False) -> Console:
    """Where people read."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else WIDTH_OF_A_PIPE, highlight=False)


def document(value: Any) -> None:
    """Print one JSON document for a machine."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def line(value: Any) -> None:
    """Print one JSON document on one line, for a machine that reads while more comes."""
    import msgspec

    typer.echo(msgspec.json.encode(value).decode())


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table for people; the first column is never folded."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(columns):
        drawn.add_column(name, no_wrap=place == 0)
    for row in rows:
        drawn.add_row(*(Text("" if value is None else str(value), style=_style(value)) for value in row))
    console().print(drawn)


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


def instant(ms: int | None) -> str:
    """An instant as people read it, in UTC."""
    if ms is None:
        return ""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(" ", "milliseconds").removesuffix("+00:00") + "Z"


def how_far(progress: Mapping[str, Any]) -> str:
    """What a handler said of its progress, with a bar for its percentage."""
    share = progress.get("pct")
    told = [f"{_bar(share)} {share} %"] if isinstance(share, int) else []
    told += [value if name == "message" else f"{name}: {value}" for name, value in progress.items() if name != "pct"]
    return ", ".join(map(str, told))


def _bar(pct: int) -> str:
    full = round(min(max(pct, 0), 100) * WIDTH_OF_A_BAR / 100)
    return "━" * full + "╌" * (WIDTH_OF_A_BAR - full)


@contextmanager
def telling_errors() -> Iterator[None]:
    """Turn a refusal into words on stderr and an exit code; anything else is a bug and keeps its traceback."""
    from flowfabric.errors import FabricError

    try:
        yield
    except FabricError as error:
        typer.echo(f"ff: {error}", err=True)
        if hint := hint_for(error):
            typer.echo(f"Hint: {hint}", err=True)
        raise typer.Exit(1) from None


def hint_for(error: FabricError) -> str | None:
    """What to do about it, when there is something to say."""
    from flowfabric import errors, ids

    match error:
        case errors.SchemaTooNew():
            return "update this installation: pip install --upgrade flowfabric"
        case errors.PartitionMismatch():
            return (
                "set FF_FLOW_PARTITIONS, FF_BUDGET_PARTITIONS and FF_QUOTA_PARTITIONS as they are stored, or unset them"
            )
        case errors.Unavailable(op="open"):
            return "`ff migrate` makes or updates the store; --store or FLOWFABRIC_URL names another"
        case errors.StoreUnavailable(backend="SQLite"):
            return "is it the right file, and may you write to it and to its folder? `ff doctor` looks closer"
        case errors.StoreUnavailable():
            return "is the address right and the server up? `ff doctor` looks closer"
        case errors.Unauthorized():
            return "FLOWFABRIC_TOKEN holds the token for the server; ask whoever runs it for one that is good for this"
        case errors.InvalidInput(detail=detail) if detail.startswith("public_state:"):
            return f"the states are {', '.join(STATES)}"
        case errors.NotFound(entity="budget") | ids.InvalidUuid(facts={"field": "budget_id"}):
            return "`ff budgets` shows which budgets there are"
        case errors.NotFound():
            return "`ff ls` shows which executions there are"
        case errors.ExecutionNotActive():
            return "it has ended already: `ff show` tells how, `ff replay` gives it another life"
        case errors.ExecutionNotTerminal():
            return "only what has ended can be replayed: `ff show` tells where it stands"
        case ids.MissingTag() | ids.InvalidPartitionIndex() | ids.InvalidUuid():
            return "an execution id looks like '{fp:86}:1a255fe9-f16a-4af0-8cb6-6085de2ea47d'; quote it for the shell"
        case _:
            return None
