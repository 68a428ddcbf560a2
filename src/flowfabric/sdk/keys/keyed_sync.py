"""Blocking twins of `Keyed` and `Starter`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from flowfabric.sdk.durations import Duration
from flowfabric.sdk.keys.keyed import Keyed, Starter
from flowfabric.sdk.sync import SyncRun, SyncRunMethods

if TYPE_CHECKING:
    from flowfabric.sdk.run import OutputFrame, Reset
    from flowfabric.sdk.worker.threads import Portal

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class SyncKeyed(SyncRunMethods[R], Generic[P, R]):
    """The blocking twin of `Keyed`: each call finds the run that has the key, and raises `NotFound` without one."""

    _run: Keyed[P, R]

    def run(self) -> SyncRun[R]:
        """Return the run that has the key now."""
        return SyncRun(self._portal.call(self._run.run()), self._portal)

    def or_start(self, *args: P.args, **kwargs: P.kwargs) -> SyncStarter[R]:
        """Return the same, with a run that is created by the message if there is none."""
        return SyncStarter(self._run.or_start(*args, **kwargs), self._portal)

    @overload
    def watch(self, name: str, shape: type[T]) -> Iterator[T]: ...
    @overload
    def watch(self, name: str, shape: Any = Any) -> Iterator[Any]: ...
    def watch(self, name: str, shape: Any = Any) -> Iterator[Any]:
        """Iterate over the values of a fact, until the run ends; the run is found at once."""
        return self.run().watch(name, shape)

    def stream(self, name: str, *, after: str | None = None) -> Iterator[OutputFrame | Reset]:
        """Iterate over what its handler writes to this output; the run is found at once."""
        return self.run().stream(name, after=after)


class SyncStarter(Generic[R]):
    """The blocking twin of `Starter`."""

    def __init__(self, starter: Starter[R], portal: Portal) -> None:
        self._starter = starter
        self._portal = portal

    def run(self) -> SyncRun[R]:
        """Return the run that has the key; create it if there is none."""
        return SyncRun(self._portal.call(self._starter.run()), self._portal)

    def signal(self, name: str, value: Any = None) -> SyncRun[R]:
        """Send a message to the run that has the key, or create one with it; return the run."""
        return SyncRun(self._portal.call(self._starter.signal(name, value)), self._portal)

    @overload
    def ask(self, name: str, value: Any, shape: type[T], *, timeout: Duration | None = None) -> T: ...
    @overload
    def ask(self, name: str, value: Any = None, shape: Any = Any, *, timeout: Duration | None = None) -> Any: ...
    def ask(self, name: str, value: Any = None, shape: Any = Any, *, timeout: Duration | None = None) -> Any:
        """Send a message like `signal`, and return the reply of the handler."""
        return self._portal.call(self._starter.ask(name, value, shape, timeout=timeout))
