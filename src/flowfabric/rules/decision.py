"""decision: split from flowfabric.rules.change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic

import msgspec

from flowfabric.errors import FabricError
from flowfabric.model.change import A, Change


class Decision(msgspec.Struct, Generic[A], frozen=True):
    """What a rule decided.

    The answer is a value, a refusal, or a function of the commit's time when it names an instant. A refusal may come
    with a change too: a lapsed lease is refused and marked.
    """

    answer: A | Callable[[int], A] | FabricError
    change: Change | None = None

    def unwrap(self, now: int) -> A:
        """The answer as of the commit at `now`; raises the refusal."""
        answer = self.answer
        if isinstance(answer, FabricError):
            raise answer
        if callable(answer):
            return answer(now)
        return answer


def refuse(error: FabricError) -> Decision[Any]:
    """A refusal that leaves everything as it is."""
    return Decision(error)
