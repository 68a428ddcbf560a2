"""What people see of the demo: a live table on a terminal, plain lines elsewhere."""

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
    """One order as it stands."""

    name: str
    state: str
    attempts: int
    worker: str
    progress: int


class Screen:
    """Shows sights as they change, and says what happens beside them."""

    def __init__(self, *, aside: bool = False) -> None:
        """`aside` leaves stdout to whoever wants the claims as a document."""
        stream = sys.stderr if aside else sys.stdout
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows no ticks gets question marks
            stream.reconfigure(errors="replace")
        self.console = Console(stderr=aside, highlight=False, width=None if stream.isatty() else 120)
        self.claims: list[dict[str, object]] = []
        self._began = monotonic()
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

    def show(self, sights: Sequence[OrderStatus]) -> None:
        """The orders as they are now."""
        if self._live is not None:
            self._live.update(render_table(sights))
            return
        for sight in sights:
            now = sight.state, sight.attempts, sight.worker
            if self._shown.get(sight.name) != now:
                self._shown[sight.name] = now
                attempt = f"attempt {sight.attempts}" if sight.attempts else ""
                by = f"by {sight.worker}" if sight.worker else ""
                self.print_event(f"{sight.name:<8} {sight.state:<16} {attempt:<10} {by}".rstrip())

    def print_event(self, words: str, style: str = "") -> None:
        """Something that happened."""
        self.console.print(Text(f"{monotonic() - self._began:5.1f} s  {words}", style=style))

    def print_claim(self, claim: str, held: bool, detail: str) -> None:
        """Something that was to be proven."""
        self.claims.append({"claim": claim, "held": held, "detail": detail})
        mark = ("✓ ", "green") if held else ("✗ ", "red")
        self.console.print(Text.assemble(mark, f"{claim}: {detail}"))


def render_table(sights: Sequence[OrderStatus]) -> Table:
    """A row for each; what a narrow terminal has no room for is cut from the right, names and states last."""
    table = Table(box=None, pad_edge=False)
    for name, width, least in (("order", 9, 8), ("state", 16, 10), ("attempt", 7, 1), ("worker", 8, 1), ("", 24, 1)):
        table.add_column(name, min_width=least, max_width=width, no_wrap=True)
    for sight in sights:
        done = 100 if sight.state == "completed" else sight.progress
        table.add_row(
            sight.name,
            Text(sight.state, style=COLOURS.get(sight.state, "")),
            str(sight.attempts or ""),
            sight.worker,
            ProgressBar(total=100, completed=done) if sight.attempts else "",
        )
    return table
