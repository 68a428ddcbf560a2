"""Who does a background sweep at the moment."""

from __future__ import annotations

import msgspec


class SweepLease(msgspec.Struct, frozen=True):
    """One sweep, held by one process for a short while; any process may take it over afterwards."""

    sweep: str
    holder: str
    lease_until: int
    revision: int = 0
