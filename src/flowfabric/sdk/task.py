"""A task: a function that can be submitted, with everything its runs should know."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import msgspec

from flowfabric.engine.pulling import CreateExecution
from flowfabric.errors import FabricError, InvalidInput
from flowfabric.model.answers import Duplicate
from flowfabric.sdk.codec import Signature
from flowfabric.sdk.context import Context
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.failing import Retry
from flowfabric.sdk.run import Run

if TYPE_CHECKING:
    from flowfabric.sdk.fabric import Fabric

P = ParamSpec("P")
R = TypeVar("R")


class Options(msgspec.Struct, frozen=True):
    """How one submit differs from the task's own ways."""

    lane: str = "default"
    priority: int = 0
    retry: Retry | None = None
    needs: frozenset[str] = frozenset()
    timeout_ms: int | None = None
    delay_ms: int | None = None
    deadline: datetime | None = None
    key: str | None = None
    tags: dict[str, str] = {}

    def policy(self) -> str | None:
        """The execution policy that the engine keeps; None when there is nothing to say."""
        policy: dict[str, Any] = {}
        if self.retry is not None:
            policy["retry_policy"] = self.retry.policy()
        if self.needs:
            policy["routing_requirements"] = {"required_capabilities": sorted(self.needs)}
        return msgspec.json.encode(policy).decode() if policy else None


class Call(msgspec.Struct, Generic[R], frozen=True):
    """A task with its arguments: something that can be submitted later, together with others."""

    task: Task[Any, R]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Task(Generic[P, R]):
    """A function whose calls survive: `submit` hands one over, a plain call just runs it."""

    def __init__(
        self, app: Fabric, handler: Callable[..., Any], *, name: str, isolation: str, options: Options
    ) -> None:
        self.app = app
        self.name = name
        self.handler = handler
        self.isolation = isolation
        self.own = options
        self.signature = Signature(handler, Context)
        self.is_async = inspect.iscoroutinefunction(handler)
        self.__doc__ = handler.__doc__
        self.__name__ = getattr(handler, "__name__", name)
        self.__wrapped__ = handler

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """A plain call of the function, for unit tests: no engine is involved."""
        return self.handler(*args, **kwargs)

    def options(
        self,
        *,
        delay: Duration | None = None,
        key: str | None = None,
        tags: Mapping[str, str] | None = None,
        priority: int | None = None,
        lane: str | None = None,
        deadline: datetime | None = None,
        retry: Retry | None = None,
    ) -> Submitter[P, R]:
        """The task with other ways for the next submits; `key` makes a submit idempotent."""
        changed: dict[str, Any] = {"delay_ms": None if delay is None else to_ms(delay, "delay"), "key": key}
        given: dict[str, Any] = {"tags": None if tags is None else dict(tags), "priority": priority, "lane": lane}
        given |= {"deadline": deadline, "retry": retry}
        changed |= {name: value for name, value in given.items() if value is not None}
        return Submitter(self, msgspec.structs.replace(self.own, **changed))

    async def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Hand a call over; it is kept when this returns."""
        return await Submitter(self, self.own).submit(*args, **kwargs)

    async def submit_many(self, inputs: Iterable[Any]) -> list[Run[R]]:
        """Hand many calls over in one round trip: each input is the one argument, or a call made with `s`."""
        return await Submitter(self, self.own).submit_many(inputs)

    def s(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """A call to be submitted later."""
        return Call(self, args, kwargs)

    def run(self, run_id: str) -> Run[R]:
        """A run of this task that was submitted earlier, by its id."""
        return Run(run_id, self.name, self.signature.result, self.app.engine)

    def __repr__(self) -> str:
        return f"<Task {self.name}>"


class Submitter(Generic[P, R]):
    """A task and the options of the submits made through it."""

    def __init__(self, task: Task[P, R], options: Options) -> None:
        self._task = task
        self._options = options

    async def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Hand a call over; it is kept when this returns."""
        [run] = await self._submit([(args, kwargs)])
        return run

    async def submit_many(self, inputs: Iterable[Any]) -> list[Run[R]]:
        """Hand many calls over in one round trip."""
        calls = [(given.args, given.kwargs) if isinstance(given, Call) else ((given,), {}) for given in inputs]
        return await self._submit(calls)

    async def _submit(self, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Run[R]]:
        task, options = self._task, self._options
        payloads = [task.signature.dump(args, kwargs) for args, kwargs in calls]
        engine = await task.app.engine()
        delay_until = None if options.delay_ms is None else engine.estimate.now() + options.delay_ms
        policy = options.policy()
        asks = [
            CreateExecution(
                execution_id=engine.new_execution_id(options.lane),
                partition=0,
                namespace=task.app.namespace,
                lane_id=options.lane,
                execution_kind=task.name,
                input_payload=payload,
                payload_encoding="json",
                priority=options.priority,
                creator_identity=task.app.identity,
                idempotency_key=options.key,
                tags=options.tags,
                policy=policy,
                delay_until=delay_until,
                execution_deadline_at=_epoch_ms(options.deadline),
            )
            for payload in payloads
        ]
        made = [await engine.create(asks[0])] if len(asks) == 1 else await engine.create_executions(asks)
        runs = []
        for answer in made:
            if isinstance(answer, FabricError):
                raise answer
            created = not isinstance(answer, Duplicate)
            runs.append(Run[R](answer.execution_id, task.name, task.signature.result, task.app.engine, created=created))
        return runs


def _epoch_ms(moment: datetime | None) -> int | None:
    if moment is None:
        return None
    if moment.tzinfo is None:
        raise InvalidInput("deadline: say in which time zone (datetime.now(timezone.utc) + …)")
    return int(moment.timestamp() * 1000)


class Decorator:
    """What `@app.task(…)` returns: typed so that editors know the result of a run."""

    def __init__(self, make: Callable[[Callable[..., Any]], Task[..., Any]]) -> None:
        self._make = make

    @overload
    def __call__(self, handler: Callable[Concatenate[Context, P], Awaitable[R]]) -> Task[P, R]: ...
    @overload
    def __call__(self, handler: Callable[P, Awaitable[R]]) -> Task[P, R]: ...
    @overload
    def __call__(self, handler: Callable[Concatenate[Context, P], R]) -> Task[P, R]: ...
    @overload
    def __call__(self, handler: Callable[P, R]) -> Task[P, R]: ...
    def __call__(self, handler: Callable[..., Any]) -> Task[..., Any]:
        return self._make(handler)
