"""Charts as inline SVG: sparkline, gauge and waterfall. Numbers in, markup out; no style attributes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from markupsafe import Markup

WIDTH = 1000
FOLD_SHARE = 0.25  # an idle stretch longer than this share of the busy time is folded
FOLD_WIDTH = 40
MIN_FOLD_MS = 1000


def spark(values: Sequence[int], label: str) -> Markup:
    """Render numbers over time as bars; the label is for those who cannot see it."""
    most = max(values, default=0) or 1
    step = 100 / max(1, len(values))
    bars = Markup("").join(
        Markup('<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}"/>').format(
            index * step, 24 - 24 * value / most, step * 0.8, 24 * value / most
        )
        for index, value in enumerate(values)
        if value
    )
    return Markup(
        '<svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<line x1="0" y1="23.5" x2="100" y2="23.5"/>{}</svg>'
    ).format(label, bars)


def gauge(used: int, reserved: int, limit: int, label: str) -> Markup:
    """Render how much of a limit is used and reserved."""
    whole = max(limit, used + reserved, 1)
    colour = "bad" if used + reserved >= limit else "hold" if used + reserved >= 0.8 * limit else "ok"
    return Markup(
        '<svg class="gauge {}" viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<rect class="track" width="100" height="8"/><rect class="reserved" x="{:.2f}" width="{:.2f}" height="8"/>'
        '<rect class="used" width="{:.2f}" height="8"/></svg>'
    ).format(colour, label, 100 * used / whole, 100 * reserved / whole, 100 * used / whole)


class Bar(msgspec.Struct, frozen=True):
    """A bar of a waterfall: a stretch of time. A wait is drawn as idle."""

    label: str
    begin: int
    end: int
    colour: str
    is_idle: bool = False
    is_whole: bool = False  # True if it spans waits and the time between them, as an attempt does


Span = tuple[int, int]


class Scale:
    """Maps instants to positions; long stretches in which nothing happens are folded to a constant width.

    Waits do not count as something that happens, so that a run which waited for hours shows its seconds of work.
    """

    def __init__(self, bars: Sequence[Bar]) -> None:
        self.begin, self.end = min(bar.begin for bar in bars), max(bar.end for bar in bars)
        idle = _merge([(bar.begin, bar.end) for bar in bars if bar.is_idle])
        whole = _merge([(bar.begin, bar.end) for bar in bars if bar.is_whole])
        busy = _merge(
            [(bar.begin, bar.end) for bar in bars if not bar.is_idle and not bar.is_whole] + _subtract(whole, idle)
        )
        work_ms = sum(end - begin for begin, end in busy) or 1
        ends = [self.begin, *(end for _, end in busy)]
        begins = [*(begin for begin, _ in busy), self.end]
        self.folds = [
            (first, second)
            for first, second in zip(ends, begins, strict=True)
            if second - first > max(FOLD_SHARE * work_ms, MIN_FOLD_MS)
        ]
        self.fold_width = min(FOLD_WIDTH, WIDTH / 2 / max(1, len(self.folds)))
        shown_ms = self.end - self.begin - sum(end - begin for begin, end in self.folds)
        self._unit = (WIDTH - self.fold_width * len(self.folds)) / max(1, shown_ms)

    def x(self, at: int) -> float:
        """Return the position of an instant."""
        shown_ms, folds = at - self.begin, 0.0
        for begin, end in self.folds:
            if at > begin:
                shown_ms -= min(at, end) - begin
                folds += (min(at, end) - begin) / (end - begin)
        return shown_ms * self._unit + folds * self.fold_width


def _merge(spans: list[Span]) -> list[Span]:
    """Return the same time as spans in order that do not overlap."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _subtract(spans: list[Span], holes: list[Span]) -> list[Span]:
    """Return the spans without the holes; both are in order and do not overlap."""
    left = []
    for begin, end in spans:
        for first, last in holes:
            if first < end and last > begin:
                if first > begin:
                    left.append((begin, first))
                begin = last
        if begin < end:
            left.append((begin, end))
    return left


class Row(msgspec.Struct, frozen=True):
    """A bar of a waterfall with its drawing."""

    bar: Bar
    drawing: Markup

    @property
    def took_ms(self) -> int:
        return self.bar.end - self.bar.begin


def waterfall(bars: Sequence[Bar]) -> tuple[list[Row], list[int]]:
    """Draw stretches of time on one scale; return a row for each, and the lengths of the folded idle stretches."""
    if not bars:
        return [], []
    scale = Scale(bars)
    folds = Markup("").join(
        Markup('<rect class="fold" x="{:.1f}" width="{:.1f}" height="16"/>').format(
            scale.x(begin), round(scale.fold_width, 1)
        )
        for begin, _ in scale.folds
    )
    rows = []
    for bar in bars:
        x = min(scale.x(bar.begin), WIDTH - 4)
        drawing = Markup(
            '<svg class="lane" viewBox="0 0 {} 16" preserveAspectRatio="none" aria-hidden="true">{}'
            '<rect class="bar {}" x="{:.1f}" y="2" width="{:.1f}" height="12"/></svg>'
        ).format(WIDTH, folds, bar.colour, x, max(4.0, scale.x(bar.end) - x))
        rows.append(Row(bar, drawing))
    return rows, [end - begin for begin, end in scale.folds]
