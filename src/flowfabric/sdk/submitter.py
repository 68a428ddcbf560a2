"""`Submitter`: submits calls of a task with changed options, one or many in a round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from msgspec.structs import replace

from flowfabric.engine.types import CreateExecution
from flowfabric.errors import FabricError, InvalidInput, KeyElsewhere
from flowfabric.keyed_create import MAX_MINTS
from flowfabric.model.answers.execution import Duplicate
from flowfabric.sdk.call import Call, TaskOptions
from flowfabric.sdk.keys.key import RunKey
from flowfabric.sdk.run import Run

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.sdk.sync import SyncSubmitter
    from flowfabric.sdk.task import Task

P = ParamSpec("P")
R = TypeVar("R")


class Submitter(Generic[P, R]):
    """A task with the options of the submits made through it."""

    def __init__(self, task: Task[P, R], options: TaskOptions, using: object | None = None) -> None:
        self.task = task
        self._options = options
        self._using = using

    @property
    def sync(self) -> SyncSubmitter[P, R]:
        """The blocking twin of this object, for code that cannot await."""
        from flowfabric.sdk.sync import SyncSubmitter

        return SyncSubmitter(self, self.task.app.portal)

    def s(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Return a call with these arguments, to be submitted later."""
        return Call(self.task, args, kwargs, self._options)

    @overload
    async def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]: ...
    @overload
    async def submit(self, *args: Any, using: object, **kwargs: Any) -> Run[R]: ...
    async def submit(self, *args: Any, **kwargs: Any) -> Run[R]:
        """Submit a call. The run is stored when this returns, or with `using`, when that transaction commits."""
        using = self._using
        if "using" in kwargs and "using" not in self.task.signature.parameter_codecs:
            using = kwargs.pop("using")
        [run] = await self._submit([Call(self.task, args, kwargs, self._options)], using)
        return run

    async def submit_many(self, inputs: Iterable[Any]) -> list[Run[R]]:
        """Submit many calls in one round trip. Each input is the only argument of a call, or a call made with `s`."""
        if isinstance(inputs, str | bytes | Mapping) or not isinstance(inputs, Iterable):
            raise InvalidInput(f"inputs: {inputs!r} is not a list of inputs")
        calls = [value if isinstance(value, Call) else Call(self.task, (value,), {}, self._options) for value in inputs]
        for call in calls:
            if call.task is not self.task:
                raise InvalidInput(f"inputs: a call of {call.task.name} is not one of {self.task.name}")
        keys = [call.options.key for call in calls if call.options.key]
        if len(set(keys)) < len(keys):
            raise InvalidInput("key: one key is one run; give each call its own with task.options(key=…).s(…)")
        return await self._submit(calls, self._using)

    async def _submit(self, calls: list[Call[Any]], using: object | None) -> list[Run[R]]:
        task = self.task
        if task.key is not None:
            return await self._submit_keyed(task.key, calls, using)
        engine = await task.app.engine()
        requests = [
            await task.build_create(engine, task.signature.bind(call.args, call.kwargs), options=call.options)
            for call in calls
        ]
        answers: Sequence[Any]
        if using is not None:
            answers = await engine.create_within(using, requests)
        else:
            answers = await _create(engine, requests)
        runs = []
        for answer in answers:
            if isinstance(answer, FabricError):
                raise answer
            created = not isinstance(answer, Duplicate)
            runs.append(task.own_run(answer.execution_id, created=created))
        return runs

    async def _submit_keyed(self, key: RunKey, calls: list[Call[Any]], using: object | None) -> list[Run[R]]:
        """Submit calls of a task with a key, each by its own; `options(key=…)` takes the place of what it would be."""
        if using is not None:
            raise InvalidInput(f"using: {self.task.name} has a Key, which no transaction holds; submit it afterwards")
        signature = self.task.signature
        keyed = []
        for call in calls:
            arguments = signature.with_defaults(signature.bind(call.args, call.kwargs))
            text = call.options.key or key.resolve(self.task.name, arguments, call.options.tags)
            keyed.append(replace(call, options=replace(call.options, key=text)))
        return list(await asyncio.gather(*(self.task.submit_keyed(call, key.policy) for call in keyed)))


async def _create(engine: EngineAPI, requests: list[CreateExecution]) -> Sequence[Any]:
    """Create runs; those with a key whose lane was spread differently meanwhile get another id."""
    answers: list[Any]
    if len(requests) == 1:
        try:
            return [await engine.create(requests[0])]
        except KeyElsewhere as elsewhere:
            answers = [elsewhere]
    else:
        answers = list(await engine.create_executions(requests))
    for _ in range(MAX_MINTS - 1):
        moved = [place for place, answer in enumerate(answers) if isinstance(answer, KeyElsewhere)]
        if not moved:
            break
        await engine.refresh_lanes()
        again = [with_fresh_id(engine, requests[place]) for place in moved]
        for place, answer in zip(moved, await engine.create_executions(again), strict=True):
            answers[place] = answer
    return answers


def with_fresh_id(engine: EngineAPI, request: CreateExecution) -> CreateExecution:
    """Return the request with an id on the partition that its key has now."""
    lane = request.key_lane or request.lane_id
    return replace(request, execution_id=engine.new_execution_id(lane, request.idempotency_key))
