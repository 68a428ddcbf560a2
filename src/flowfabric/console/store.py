"""The store and this process: backend, schema, clock, sweeps and errors."""

from __future__ import annotations

import time
from typing import ClassVar

import msgspec

from flowfabric import __version__
from flowfabric.console.pages import Ui, View, page


class SweepRow(msgspec.Struct, frozen=True):
    """A sweep as this process has run it."""

    name: str
    passes: int
    restarts: int
    average_ms: float


class StorePage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "store.html"
    backend: str
    release: str
    schema_version: int
    partitions: int
    ping_ms: float
    now_is_skewed_by_ms: int
    sweeps: list[SweepRow]
    errors: list[tuple[str, int]]


@page("/store")
async def show_store(ui: Ui) -> StorePage:
    """Show the store; it belongs to no namespace, so a caller that is bound to some does not see it."""
    ui.require_all_namespaces()
    began = time.perf_counter()
    now = await ui.engine.ping()
    took_ms = (time.perf_counter() - began) * 1000
    engine, metrics = ui.engine, ui.engine.metrics
    sweeps = []
    for (name, labels), timing in sorted(metrics.histograms.items(), key=lambda item: item[0]):
        if name == "ff_scanner_cycle_duration":
            sweep = dict(labels).get("scanner", "") or ", ".join(value for _, value in labels)
            restarts = metrics.counters.get(("ff_scanner_restart", labels), 0)
            sweeps.append(SweepRow(sweep, timing.count, restarts, round(timing.total_s * 1000 / timing.count, 1)))
    return StorePage(
        title="Store",
        backend=engine.capabilities().backend,
        release=__version__,
        schema_version=engine.schema.current,
        partitions=engine.partitions.flow,
        ping_ms=round(took_ms, 1),
        now_is_skewed_by_ms=round(now - time.time() * 1000),
        sweeps=sweeps,
        errors=sorted(
            (dict(labels).get("kind", ""), count)
            for (name, labels), count in metrics.counters.items()
            if name == "ff_errors"
        ),
    )
