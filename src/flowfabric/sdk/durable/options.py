"""`ctx.options(…)`: how the next step is run, in one line with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from flowfabric.sdk.durable.step_identity import StepOptions

if TYPE_CHECKING:
    from flowfabric.sdk.context import Context
    from flowfabric.sdk.durable.sync_context import SyncContext

P = ParamSpec("P")
T = TypeVar("T")


class ContextOptions:
    """A context with options for a step."""

    def __init__(self, context: Context, options: StepOptions) -> None:
        self._context = context
        self._options = options

    @overload
    async def step(self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def step(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def step(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function once and record its result, as `ctx.step` does, with these options."""
        return await self._context.run_step(function, args, kwargs, self._options)


class SyncContextOptions:
    """The blocking twin of `ContextOptions`."""

    def __init__(self, context: SyncContext, options: StepOptions) -> None:
        self._context = context
        self._options = options

    @overload
    def step(self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def step(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def step(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function once and record its result, as `ctx.sync.step` does, with these options."""
        return self._context.run_step(function, args, kwargs, self._options)
