"""A task: a function that can be submitted, with everything its runs should know."""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import msgspec

from flowfabric.engine.claiming.poller import CreateExecution
from flowfabric.engine.validation import execution as validate
from flowfabric.errors import FabricError, InvalidInput
from flowfabric.model.answers.execution import Duplicate
from flowfabric.sdk import validation
from flowfabric.sdk.context import Context, run_with_context, set_current
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.limits import Budget, CallLimits, Limit, ScopeSelector, resolve_scope
from flowfabric.sdk.retry import Retry
from flowfabric.sdk.run import Run
from flowfabric.sdk.serialization.inputs import (
    BUDGET_IDS_KEY,
    JSON_ENCODING,
    JSON_WITH_RESULTS_ENCODING,
    InputWithResults,
)
from flowfabric.sdk.serialization.values import Signature

if TYPE_CHECKING:
    from flowfabric.engine_api import EngineAPI
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.sync import SyncSubmitter

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class TaskOptions(msgspec.Struct, frozen=True):
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
    budgets: tuple[Budget, ...] = ()
    limits: tuple[Limit, ...] = ()
    fair: ScopeSelector | None = None
    weight: int = 1

    @property
    def depends_on_arguments(self) -> bool:
        """Whether the arguments of a call have a say in its policy."""
        return bool(self.budgets or self.limits or self.fair is not None)

    def policy(self, bound: CallLimits, *, is_read: bool = False) -> str | None:
        """The execution policy that the engine keeps; None when there is nothing to say."""
        policy: dict[str, Any] = {"kept_for_successors": True} if is_read else {}
        if self.retry is not None:
            policy["retry_policy"] = self.retry.policy()
        if self.needs:
            policy["routing_requirements"] = {"required_capabilities": sorted(self.needs)}
        if bound.budgets:
            policy["budget_ids"] = [budget_id for _, budget_id, _ in bound.budgets.values()]
            policy[BUDGET_IDS_KEY] = {name: budget_id for name, (_, budget_id, _) in bound.budgets.items()}
        if bound.limits:
            policy["quota_policy_ids"] = list(bound.limits)
        if bound.fairness_key is not None:
            policy |= {"fairness_key": bound.fairness_key, "fairness_weight": self.weight}
        return msgspec.json.encode(policy).decode() if policy else None


def validate_submit_options(**given: Any) -> dict[str, Any]:
    """Those of the options that a submit may change, checked; what is not named stays as it is."""
    checks: dict[str, Callable[[Any], Any]] = {
        "lane": validate.validate_lane_id,
        "priority": lambda value: validation.validate_int("priority", value),
        "weight": lambda value: validation.validate_int("weight", value, minimum=1),
        "tags": validation.validate_tags,
        "retry": _a_retry,
        "fair": _a_scope,
        "deadline": _a_moment,
        "key": _a_key,
    }
    return {name: checks[name](value) for name, value in given.items()}


def _a_retry(value: object) -> Retry | None:
    if value is not None and not isinstance(value, Retry):
        raise InvalidInput(f"retry: {value!r} is no Retry; write retry=Retry(max=3)")
    return value


def _a_scope(value: object) -> ScopeSelector | None:
    if value is not None and not isinstance(value, str) and not callable(value):
        raise InvalidInput(f"fair: {value!r} is neither the name of a parameter nor a function of the arguments")
    return value


def _a_key(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInput(f'key: {value!r} is no text that tells one piece of work from another, as "order-7" does')
    return value


def _a_moment(value: object) -> datetime:
    if not isinstance(value, datetime):
        raise InvalidInput(f"deadline: {value!r} is no datetime; write datetime.now(timezone.utc) + timedelta(hours=1)")
    if value.tzinfo is None:
        raise InvalidInput("deadline: say in which time zone (datetime.now(timezone.utc) + …)")
    return value


NO_CALL_LIMITS = CallLimits()


class Call(msgspec.Struct, Generic[R_co], frozen=True):
    """A task with its arguments: something that can be submitted later, together with others."""

    task: Task[Any, R_co]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: TaskOptions


def as_call(given: Any, /, *args: Any, **kwargs: Any) -> Call[Any]:
    """A call that was made with `s`, or one of a task with these arguments."""
    if isinstance(given, Task | Submitter):
        return given.s(*args, **kwargs)
    if not isinstance(given, Call):
        raise InvalidInput(f"{given!r} is neither a task nor a call; write task.s(argument)")
    if args or kwargs:
        raise InvalidInput(f"a call of {given.task.name} has its arguments already")
    return given


def child_calls(given: tuple[Any, ...]) -> list[Any] | None:
    """The children that `gather` was given, as calls side by side or as a list of them; None for things to await."""
    if len(given) == 1 and isinstance(given[0], Iterable) and not isinstance(given[0], Awaitable | str | bytes):
        return list(given[0])
    return list(given) if any(isinstance(one, Call) for one in given) or not given else None


class Task(Generic[P, R]):
    """A function whose calls survive: `submit` hands one over, a plain call just runs it."""

    def __init__(
        self,
        app: Fabric,
        handler: Callable[..., Any],
        *,
        name: str,
        isolation: str,
        on_mismatch: str,
        options: TaskOptions,
    ) -> None:
        if isolation == "process" and "<locals>" in handler.__qualname__:
            raise InvalidInput(f'{name}: isolation="process" needs a function at the top level of a module')
        self.app = app
        self.name = name
        self.handler = handler
        self.module = handler.__module__
        self.isolation = isolation
        self.on_mismatch = on_mismatch
        self.own = options
        validation.validate_keyword_parameters(handler)
        self.signature = Signature(handler, Context)
        self.is_async = inspect.iscoroutinefunction(handler)
        self.timeout_s = None if options.timeout_ms is None else options.timeout_ms / 1000
        self.__doc__ = handler.__doc__
        self.__name__ = getattr(handler, "__name__", name)
        self.__wrapped__ = handler

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """A plain call of the function, for unit tests: no engine is involved, and a context is made up."""
        name = self.signature.context_name
        if name is None or any(isinstance(given, Context) for given in (*args, *kwargs.values())):
            return self.handler(*args, **kwargs)
        from flowfabric.sdk.local_context import LocalContext

        context = LocalContext(self)
        arguments = self.with_context(self.signature.bind(args, kwargs), lambda: context)
        if self.is_async:
            return run_with_context(context, self.handler(**arguments))
        surroundings = contextvars.copy_context()
        surroundings.run(set_current, context)
        return surroundings.run(lambda: self.handler(**arguments))

    def with_context(self, arguments: dict[str, Any], context: Callable[[], Context]) -> dict[str, Any]:
        """The arguments of a handler, its context among them if it asks for one."""
        name = self.signature.context_name
        return arguments if name is None else {**arguments, name: context()}

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
        fair: ScopeSelector | None = None,
        weight: int | None = None,
        using: object | None = None,
    ) -> Submitter[P, R]:
        """The task with other ways for the next submits; `key` makes a submit idempotent.

        A key holds for 24 hours after the submit that first used it: until then the same key is the same run, ended or
        not; later it makes a new one. It is the task's own: another task may use the same key, and another lane changes
        nothing.
        `using` is a connection to the store's own Postgres database: the run then exists when its transaction commits.
        """
        changed: dict[str, Any] = {"delay_ms": None if delay is None else to_ms(delay, "delay")}
        given: dict[str, Any] = {"key": key, "tags": tags, "priority": priority, "lane": lane, "deadline": deadline}
        given |= {"retry": retry, "fair": fair, "weight": weight}
        changed |= validate_submit_options(**{name: value for name, value in given.items() if value is not None})
        return Submitter(self, msgspec.structs.replace(self.own, **changed), using)

    @property
    def sync(self) -> SyncSubmitter[P, R]:
        """The same for code that cannot await."""
        return Submitter(self, self.own).sync

    @overload
    async def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]: ...
    @overload
    async def submit(self, *args: Any, using: object, **kwargs: Any) -> Run[R]: ...
    async def submit(self, *args: Any, **kwargs: Any) -> Run[R]:
        """Hand a call over; it is kept when this returns, or with `using` when that transaction commits."""
        return await Submitter(self, self.own).submit(*args, **kwargs)

    async def submit_many(self, inputs: Iterable[Any]) -> list[Run[R]]:
        """Hand many calls over in one round trip: each input is the one argument, or a call made with `s`."""
        return await Submitter(self, self.own).submit_many(inputs)

    def s(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """A call to be submitted later."""
        return Call(self, args, kwargs, self.own)

    def run(self, run_id: str) -> Run[R]:
        """A run of this task that was submitted earlier, by its id."""
        return Run(run_id, self.name, self.signature.result_codec, self.app)

    def own_run(self, run_id: str, *, created: bool = True) -> Run[R]:
        """A run of this task that belongs to the app's namespace; the result of any other is refused."""
        namespace = self.app.namespace
        return Run(run_id, self.name, self.signature.result_codec, self.app, created=created, namespace=namespace)

    async def ask(
        self,
        engine: EngineAPI,
        arguments: dict[str, Any],
        *,
        options: TaskOptions,
        execution_id: str | None = None,
        results: dict[str, str | list[str]] | None = None,
        is_read: bool = False,
    ) -> CreateExecution:
        """What to ask the engine for, for a call with these arguments; wrong input is refused here.

        `results` are the runs whose results will be the other arguments; `is_read` tells that its own will be one.
        """
        signature = self.signature
        payload = (
            InputWithResults(signature.dump(arguments), results).to_json() if results else signature.to_json(arguments)
        )
        bound = NO_CALL_LIMITS
        if options.depends_on_arguments:
            bound = self.bound(options, arguments, unknown=(results or {}).keys())
            await self.app.declare_bound(engine, bound)
        # Keys are told apart within a partition, and that is the lane's: a key stays where its task is at home.
        home = options.lane if options.key is None else self.own.lane
        return CreateExecution(
            execution_id=execution_id or engine.new_execution_id(home),
            partition=0,
            namespace=self.app.namespace,
            lane_id=options.lane,
            execution_kind=self.name,
            input_payload=payload,
            payload_encoding=JSON_WITH_RESULTS_ENCODING if results else JSON_ENCODING,
            priority=options.priority,
            creator_identity=self.app.identity,
            idempotency_key=None if options.key is None else f"{self.name}|{options.key}",
            tags=options.tags,
            policy=options.policy(bound, is_read=is_read),
            delay_until=None if options.delay_ms is None else engine.estimate.now() + options.delay_ms,
            execution_deadline_at=_epoch_ms(options.deadline),
        )

    def bound(self, options: TaskOptions, arguments: Mapping[str, Any], unknown: Collection[str] = ()) -> CallLimits:
        """The budgets and limits that hold for a call with these arguments, some of which may not be known yet."""
        tags, namespace = options.tags, self.app.namespace
        known = {name: value for name, value in self.signature.with_defaults(arguments).items() if name not in unknown}

        def scope(per: ScopeSelector | None, what: str) -> str:
            return resolve_scope(per, what, known, tags, all_known=not unknown)

        budgets: dict[str, tuple[Budget, str, str]] = {}
        for budget in options.budgets:
            whose = scope(budget.per, f"budget {budget.name}")
            budgets[budget.name] = (budget, budget.id(namespace, whose), whose)
        limits = {
            limit.id(namespace, self.name, scope(limit.per, f"limit of {self.name}")): limit for limit in options.limits
        }
        fair = scope(options.fair, f"fairness of {self.name}") if options.fair else None
        return CallLimits(budgets, limits, fair)

    def __repr__(self) -> str:
        return f"<Task {self.name}>"


class AsyncTask(Task[P, R]):
    """A task whose function is awaited; so is a plain call of it."""

    if TYPE_CHECKING:  # for editors: what is known of the result of a plain call

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...


class PlainTask(Task[P, R]):
    """A task whose function is called."""

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


class Submitter(Generic[P, R]):
    """A task and the options of the submits made through it."""

    def __init__(self, task: Task[P, R], options: TaskOptions, using: object | None = None) -> None:
        self.task = task
        self._options = options
        self._using = using

    @property
    def sync(self) -> SyncSubmitter[P, R]:
        """The same for code that cannot await."""
        from flowfabric.sdk.sync import SyncSubmitter

        return SyncSubmitter(self, self.task.app.portal)

    def s(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """A call to be submitted later."""
        return Call(self.task, args, kwargs, self._options)

    @overload
    async def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]: ...
    @overload
    async def submit(self, *args: Any, using: object, **kwargs: Any) -> Run[R]: ...
    async def submit(self, *args: Any, **kwargs: Any) -> Run[R]:
        """Hand a call over; it is kept when this returns, or with `using` when that transaction commits."""
        using = self._using
        if "using" in kwargs and "using" not in self.task.signature.parameter_codecs:
            using = kwargs.pop("using")
        [run] = await self._submit([Call(self.task, args, kwargs, self._options)], using)
        return run

    async def submit_many(self, inputs: Iterable[Any]) -> list[Run[R]]:
        """Hand many calls over in one round trip."""
        if isinstance(inputs, str | bytes | Mapping) or not isinstance(inputs, Iterable):
            raise InvalidInput(f"inputs: {inputs!r} is not a list of inputs")
        calls = [given if isinstance(given, Call) else Call(self.task, (given,), {}, self._options) for given in inputs]
        for call in calls:
            if call.task is not self.task:
                raise InvalidInput(f"inputs: a call of {call.task.name} is not one of {self.task.name}")
        keys = [call.options.key for call in calls if call.options.key]
        if len(set(keys)) < len(keys):
            raise InvalidInput("key: one key is one run; give each call its own with task.options(key=…).s(…)")
        return await self._submit(calls, self._using)

    async def _submit(self, calls: list[Call[Any]], using: object | None) -> list[Run[R]]:
        task = self.task
        engine = await task.app.engine()
        asks = [
            await task.ask(engine, task.signature.bind(call.args, call.kwargs), options=call.options) for call in calls
        ]
        made: Sequence[Any]
        if using is not None:
            made = await engine.create_within(using, asks)
        else:
            made = [await engine.create(asks[0])] if len(asks) == 1 else await engine.create_executions(asks)
        runs = []
        for answer in made:
            if isinstance(answer, FabricError):
                raise answer
            created = not isinstance(answer, Duplicate)
            runs.append(task.own_run(answer.execution_id, created=created))
        return runs


def _epoch_ms(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp() * 1000)


class TaskDecorator:
    """What `@app.task(…)` returns: typed so that editors know the result of a run."""

    def __init__(self, make: Callable[[Callable[..., Any]], Task[..., Any]]) -> None:
        self._make = make

    # In this order: what is awaited is also something that is called, and the first that fits is taken.
    @overload
    def __call__(self, handler: Callable[Concatenate[Context, P], Awaitable[R]]) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, handler: Callable[P, Awaitable[R]]) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, handler: Callable[Concatenate[Context, P], R]) -> PlainTask[P, R]: ...
    @overload
    def __call__(self, handler: Callable[P, R]) -> PlainTask[P, R]: ...
    def __call__(self, handler: Callable[..., Any]) -> Task[..., Any]:
        return self._make(handler)
