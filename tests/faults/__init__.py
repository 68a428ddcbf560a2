"""Seeded faults: each is a small mistake in the source that a test has to detect.

A new one is added to the list of its area, in the module of that name.

A fault whose text no longer occurs fails a quick test: update the fault, or remove it if it has become impossible.
"""

from __future__ import annotations

from tests.faults.dead_entries import DEAD_ENTRIES
from tests.faults.durable import DURABLE
from tests.faults.engine import ENGINE
from tests.faults.failures import FAILURES
from tests.faults.rules import RULES
from tests.faults.schedules import SCHEDULES
from tests.faults.security import SECURITY
from tests.faults.stores import STORES
from tests.faults.valkey_client import VALKEY_CLIENT

FAULTS = (*RULES, *ENGINE, *STORES, *VALKEY_CLIENT, *SECURITY, *FAILURES, *DEAD_ENTRIES, *DURABLE, *SCHEDULES)
