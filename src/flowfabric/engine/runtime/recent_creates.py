"""RecentCreates: the executions that this process has just created.

A caller that waits for the result of such an execution first waits for a wakeup, without a load.
"""

from __future__ import annotations

from collections import OrderedDict

from flowfabric.engine.runtime.wakeups import Wakeups

MAX_RECENT_CREATES = 1000


class RecentCreates:
    """Knows which executions were created here and may still be running."""

    def __init__(self, wakeups: Wakeups) -> None:
        self._wakeups = wakeups
        self._completions: OrderedDict[str, int] = OrderedDict()  # by execution: completions seen before its create

    def add(self, execution_id: str, completions_before: int) -> None:
        """Remember an execution that was created after so many completions."""
        self._completions[execution_id] = completions_before
        if len(self._completions) > MAX_RECENT_CREATES:
            self._completions.popitem(last=False)

    def take(self, execution_id: str) -> bool:
        """Forget an execution; True if no completion was seen since it was created."""
        return self._completions.pop(execution_id, None) == self._wakeups.completion_count
