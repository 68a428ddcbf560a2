"""Sweep leases: each background sweep is held by one process at a time, for a short while; there is no leader."""

from __future__ import annotations

from flowfabric.model.change import Change, Guard, Upsert
from flowfabric.model.deployment import SweepLease
from flowfabric.model.instant import FromNow
from flowfabric.rules.decision import Decision


def hold_sweep(row: SweepLease | None, sweep: str, holder: str, ttl_ms: int, now: int) -> Decision[int]:
    """Acquire or renew a sweep; the answer is how many milliseconds another process holds it, 0 if this one does."""
    if row is not None and row.holder != holder and row.lease_until > now:
        return Decision(row.lease_until - now)
    guard = Guard(SweepLease, (sweep,), None if row is None else row.revision)
    not_before = None if row is None or row.holder == holder else row.lease_until
    lease = Upsert(SweepLease(sweep, holder, FromNow(ttl_ms)))
    return Decision(0, Change(guards=(guard,), writes=(lease,), not_before=not_before))


def release_sweep(row: SweepLease | None, holder: str) -> Decision[bool]:
    """Release a sweep, so that another process need not wait until its lease expires."""
    if row is None or row.holder != holder:
        return Decision(False)
    guard = Guard(SweepLease, (row.sweep,), row.revision)
    return Decision(True, Change(guards=(guard,), writes=(Upsert(SweepLease(row.sweep, holder, 0)),)))
