"""The output of the demo: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

import msgspec
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

COLOURS = {"active": "cyan", "completed": "green", "delayed": "yellow", "failed": "red"}
COLOURS |= {"suspended": "magenta", "skipped": "dim", "waiting": "dim", "waiting_children": "dim"}


class OrderStatus(msgspec.Struct, frozen=True):
    """The current status of one order."""

    name: str
    state: str
    attempts: int
    worker: str
    progress: int


class Screen:
    """Shows the status of all orders, and prints events and claims."""

    def __init__(self, *, aside: bool = False) -> None:
        """Print to stdout, or with `aside` to stderr, if stdout is used for the JSON document."""
        stream = sys.stderr if aside else sys.stdout
        if isinstance(stream, io.TextIOWrapper):  # an encoding without check marks gets question marks
            stream.reconfigure(errors="replace")
        self.console = Console(stderr=aside, highlight=False, width=None if stream.isatty() else 120)
        self.claims: list[dict[str, object]] = []
        self._started_at = monotonic()
        self._live: Live | None = None
        self._shown: dict[str, tuple[str, int, str]] = {}

    @contextmanager
    def live_table(self) -> Iterator[None]:
        """Keep the table on the screen."""
        if not self.console.is_terminal or self.console.is_dumb_terminal:
            yield
            return
        with Live(console=self.console, refresh_per_second=12) as self._live:
            yield

    def show(self, statuses: Sequence[OrderStatus]) -> None:
        """Show the current statuses: update the table, or print those that have changed."""
        if self._live is not None:
            self._live.update(render_table(statuses))
            return
        for status in statuses:
            now = status.state, status.attempts, status.worker
            if self._shown.get(status.name) != now:
                self._shown[status.name] = now
                attempt = f"attempt {status.attempts}" if status.attempts else ""
                by = f"by {status.worker}" if status.worker else ""
                self.print_event(f"{status.name:<8} {status.state:<16} {attempt:<10} {by}".rstrip())

    def print_event(self, text: str, style: str = "") -> None:
        """Print an event with its time."""
        self.console.print(Text(f"{monotonic() - self._started_at:5.1f} s  {text}", style=style))

    def print_claim(self, claim: str, held: bool, detail: str) -> None:
        """Print whether a claim holds, and keep it for the JSON document."""
        self.claims.append({"claim": claim, "held": held, "detail": detail})
        mark = ("✓ ", "green") if held else ("✗ ", "red")
        self.console.print(Text.assemble(mark, f"{claim}: {detail}"))


def render_table(statuses: Sequence[OrderStatus]) -> Table:
    """Return a table with a row per order; a narrow terminal cuts the right columns first."""
    table = Table(box=None, pad_edge=False)
    for name, width, least in (("order", 9, 8), ("state", 16, 10), ("attempt", 7, 1), ("worker", 8, 1), ("", 24, 1)):
        table.add_column(name, min_width=least, max_width=width, no_wrap=True)
    for status in statuses:
        done = 100 if status.state == "completed" else status.progress
        table.add_row(
            status.name,
            Text(status.state, style=COLOURS.get(status.state, "")),
            str(status.attempts or ""),
            status.worker,
            ProgressBar(total=100, completed=done) if status.attempts else "",
        )
    return table
