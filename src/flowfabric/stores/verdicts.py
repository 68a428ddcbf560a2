"""Verdicts: what a commit answers for each change, and the faults from which a store derives them."""

from __future__ import annotations


class Unstorable(Exception):
    """The verdict on a change with a value that the store cannot keep; nothing of the change was written."""


class Collision(Unstorable):
    """Raised inside a store: a row to be inserted exists already. The verdict is a refusal."""


# The time of the commit; None if a guard did not hold or a row to be inserted exists; `Unstorable`.
Verdict = int | None | Unstorable


def verdict_on(fault: Unstorable) -> Verdict:
    """Return the verdict on a single change that failed with this fault."""
    return None if isinstance(fault, Collision) else fault
