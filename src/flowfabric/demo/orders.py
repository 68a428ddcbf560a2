"""The orders of the demo."""

from __future__ import annotations

import msgspec

LANE = "orders"
LEASE_MS = 1500  # short, so that the takeover does not take long
STEP_S = 0.08
FAILURE = "the payment service did not answer"
RETRIES = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 400}}}


class DemoOrder(msgspec.Struct, frozen=True):
    """An order: its number of steps, how many of its attempts fail, and whether it needs an approval first."""

    name: str
    steps: int = 4
    fails: int = 0
    needs_approval: bool = False


FLAKY = DemoOrder("order-2", fails=1)
LONG = DemoOrder("order-4", steps=12)
ORDERS = (
    DemoOrder("order-1"),
    FLAKY,
    DemoOrder("order-3"),
    LONG,
    *(DemoOrder(f"order-{number}") for number in range(5, 9)),
)


def receipt(name: str) -> bytes:
    """Return the result of an order."""
    return msgspec.json.encode({"shipped": name})
