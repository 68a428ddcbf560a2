"""All faults. Most are slips that any of us could make.

A patch that no longer applies fails a quick test; then look whether the fault has moved or has become impossible.
"""

from __future__ import annotations

from tests.faults.engine import ENGINE
from tests.faults.rules import RULES
from tests.faults.security import SECURITY
from tests.faults.stores import STORES
from tests.faults.trust import TRUST

FAULTS = (*RULES, *ENGINE, *STORES, *SECURITY, *TRUST)
