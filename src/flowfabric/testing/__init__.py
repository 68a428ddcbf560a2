"""What tests of this project, and of work built on it, stand on: stores that break on request, and invariants."""

from flowfabric.testing.faults import FlakyStore, Gate, Loss
from flowfabric.testing.invariants import InvariantBroken, Watch, check_invariants

__all__ = ["FlakyStore", "Gate", "InvariantBroken", "Loss", "Watch", "check_invariants"]
