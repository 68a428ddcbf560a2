"""Seeded faults: each is a small mistake in the source that a test has to detect.

A fault whose text no longer occurs fails a quick test: update the fault, or remove it if it has become impossible.
"""

from __future__ import annotations

from tests.faults.engine import ENGINE
from tests.faults.failures import FAILURES
from tests.faults.rules import RULES
from tests.faults.security import SECURITY
from tests.faults.stores import STORES
from tests.faults.valkey_client import VALKEY_CLIENT

FAULTS = (*RULES, *ENGINE, *STORES, *VALKEY_CLIENT, *SECURITY, *FAILURES)
