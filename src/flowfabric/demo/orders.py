"""What there is to do in the demo."""

from __future__ import annotations

import msgspec

LANE = "orders"
LEASE_MS = 1500  # short, so that nobody has to wait long for the takeover
STEP_S = 0.08
FAILURE = "the payment service did not answer"
RETRIES = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 400}}}


class DemoOrder(msgspec.Struct, frozen=True):
    """One piece of work: so many steps, so many attempts that fail, and whether somebody has to say yes first."""

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
    """The result of an order."""
    return msgspec.json.encode({"shipped": name})
