"""Decision: the result of every rule, an answer together with the change to commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic

import msgspec

from flowfabric.errors import FabricError
from flowfabric.model.change import A, Change


class Decision(msgspec.Struct, Generic[A], frozen=True):
    """What a rule decided.

    The answer is a value, a refusal, or a function of the commit time if it contains an instant. A refusal may carry a
    change as well: an expired lease is refused and marked.
    """

    answer: A | Callable[[int], A] | FabricError
    change: Change | None = None

    def unwrap(self, now: int) -> A:
        """Return the answer for a commit at `now`, or raise the refusal."""
        answer = self.answer
        if isinstance(answer, FabricError):
            raise answer
        if callable(answer):
            return answer(now)
        return answer


def refuse(error: FabricError) -> Decision[Any]:
    """Return a refusal that changes nothing."""
    return Decision(error)
