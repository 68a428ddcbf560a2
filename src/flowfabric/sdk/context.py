"""The context: what a handler knows of its run and can say about it."""

from __future__ import annotations

import contextvars
import hashlib
from typing import TYPE_CHECKING, Any

from flowfabric.handles import Handle

if TYPE_CHECKING:
    from flowfabric.engine.engine import Engine
    from flowfabric.model.answers import Claimed

_current: contextvars.ContextVar[Context] = contextvars.ContextVar("flowfabric_context")


class Context:
    """One attempt at one run, in the hands of a handler."""

    def __init__(self, engine: Engine, claimed: Claimed, task: str) -> None:
        self._engine = engine
        self._claimed = claimed
        self.task = task
        self.run_id = claimed.execution_id
        self.attempt = claimed.attempt_index
        self.cancelled = False

    @property
    def handle(self) -> Handle:
        """The lease under which this attempt runs."""
        return self._claimed.handle

    def key(self, name: str) -> str:
        """An idempotency key for a call to the outside: the same on every attempt of this run."""
        return hashlib.sha256(f"{self.run_id}|{name}".encode()).hexdigest()

    async def progress(self, done: dict[str, Any] | str | None = None, *, pct: int | None = None) -> None:
        """Say how far the work is: a percentage, a message, or both as `{"pct": 50, "phase": …}`."""
        message = done if isinstance(done, str) else None
        if isinstance(done, dict):
            import msgspec

            pct = done.get("pct", pct)
            message = msgspec.json.encode(done).decode()
        await self._engine.progress(self.handle, pct=pct, message=message)


def current() -> Context:
    """The context of the handler that is running, from anywhere below it."""
    try:
        return _current.get()
    except LookupError:
        raise RuntimeError("no handler of FlowFabric is running here") from None


def entered(context: Context) -> contextvars.Token[Context]:
    """Make a context the current one of this task or thread."""
    return _current.set(context)
