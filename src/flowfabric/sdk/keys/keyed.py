"""`Keyed`: the run that has a key, addressed without a round trip and created by the first message."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from msgspec.structs import replace

from flowfabric.engine.types import KeyPolicy, KeyUntil, MessageArgs
from flowfabric.errors import InvalidInput, NotFound, TargetNotSignalable
from flowfabric.sdk.answers import make_message, not_answered, read_answer
from flowfabric.sdk.durations import Duration, to_seconds
from flowfabric.sdk.run import OutputFrame, Reset, Run
from flowfabric.sdk.serialization.values import from_json, incoming_codec

if TYPE_CHECKING:
    from flowfabric.engine.types import ExecutionSnapshot
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.model.answers.execution import AttemptView
    from flowfabric.model.obstacles import Explanation
    from flowfabric.model.states import PublicState
    from flowfabric.sdk.call import Call
    from flowfabric.sdk.keys.keyed_sync import SyncKeyed, SyncStarter
    from flowfabric.sdk.task import Task

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

ACTOR = KeyPolicy(until=KeyUntil.ENDED)  # policy of a task without a key of its own


class Keyed(Generic[P, R]):
    """The run that has a key of a task now. Each call finds the run first; without one it raises `NotFound`."""

    def __init__(self, task: Task[P, R], key: str) -> None:
        self.task = task
        self.key = key

    @property
    def sync(self) -> SyncKeyed[P, R]:
        """The blocking twin of this object, for code that cannot await."""
        from flowfabric.sdk.keys.keyed_sync import SyncKeyed

        return SyncKeyed(self, self.task.app.portal())

    async def run(self) -> Run[R]:
        """Return the run that has the key now; it stays that run. Raises `NotFound` if there is none."""
        found = await self.task.find(self.key)
        if found is None:
            raise NotFound("execution", f"{self.task.name} has no run under {self.key!r}")
        return found

    def or_start(self, *args: P.args, **kwargs: P.kwargs) -> Starter[R]:
        """Return the same, with a run that is created by the message if there is none."""
        return Starter(self.task, self.key, self.task.s(*args, **kwargs))

    async def result(self, timeout: Duration | None = None) -> R:
        """Wait for the end of the run and return its result."""
        return await (await self.run()).result(timeout)

    async def state(self) -> PublicState:
        """Return its public state."""
        return await (await self.run()).state()

    async def describe(self) -> ExecutionSnapshot:
        """Return a snapshot of the run."""
        return await (await self.run()).describe()

    async def attempts(self) -> list[AttemptView]:
        """Return all attempts so far."""
        return await (await self.run()).attempts()

    async def cancel(self, reason: str = "") -> None:
        """Cancel the run, whatever its state."""
        await (await self.run()).cancel(reason)

    async def replay(self) -> None:
        """Run a finished run again."""
        await (await self.run()).replay()

    async def release(self, *, accept: bool = False) -> bool:
        """Let a run continue that is held because its function has changed."""
        return await (await self.run()).release(accept=accept)

    async def unpin(self, to: str | None = None) -> bool:
        """Let workers of any version continue a pinned run, or those of the version `to`."""
        return await (await self.run()).unpin(to)

    async def explain(self) -> Explanation:
        """Return why it is not running."""
        return await (await self.run()).explain()

    async def signal(self, name: str, value: Any = None, *, key: str | None = None, token: str | None = None) -> bool:
        """Send a message to its handler, as `Run.signal` does."""
        return await (await self.run()).signal(name, value, key=key, token=token)

    @overload
    async def ask(
        self, name: str, value: Any, shape: type[T], *, timeout: Duration | None = None, key: str | None = None
    ) -> T: ...
    @overload
    async def ask(
        self, name: str, value: Any = None, shape: Any = Any, *, timeout: Duration | None = None, key: str | None = None
    ) -> Any: ...
    async def ask(
        self, name: str, value: Any = None, shape: Any = Any, *, timeout: Duration | None = None, key: str | None = None
    ) -> Any:
        """Send a message and return the reply of its handler, as `Run.ask` does."""
        return await (await self.run()).ask(name, value, shape, timeout=timeout, key=key)

    @overload
    async def get(self, name: str, shape: type[T], *, wait: Duration) -> T: ...
    @overload
    async def get(self, name: str, shape: type[T], *, wait: None = None) -> T | None: ...
    @overload
    async def get(self, name: str, shape: Any = Any, *, wait: Duration | None = None) -> Any: ...
    async def get(self, name: str, shape: Any = Any, *, wait: Duration | None = None) -> Any:
        """Return the fact of this name, as `Run.get` does."""
        return await (await self.run()).get(name, shape, wait=wait)

    @overload
    def watch(self, name: str, shape: type[T]) -> AsyncIterator[T]: ...
    @overload
    def watch(self, name: str, shape: Any = Any) -> AsyncIterator[Any]: ...
    async def watch(self, name: str, shape: Any = Any) -> AsyncIterator[Any]:
        """Iterate over the values of a fact, until the run ends."""
        async for value in (await self.run()).watch(name, shape):
            yield value

    async def vote(self, link: str, value: Any = True, *, by: str = "") -> bool:
        """Answer an approval of the run with one of its links."""
        return await (await self.run()).vote(link, value, by=by)

    async def stream(self, name: str, *, after: str | None = None) -> AsyncIterator[OutputFrame | Reset]:
        """Iterate over what its handler writes to this output, until the run ends."""
        async for frame in (await self.run()).stream(name, after=after):
            yield frame

    async def progress(self) -> dict[str, Any]:
        """Return the progress that its handler last reported."""
        return await (await self.run()).progress()

    def __repr__(self) -> str:
        return f"<{self.task.name} at {self.key!r}>"


class Starter(Generic[R]):
    """The run that has a key, or a new one: the first message creates it in the same change."""

    def __init__(self, task: Task[..., R], key: str, call: Call[R]) -> None:
        self._task = task
        self._key = key
        self._call = call

    @property
    def sync(self) -> SyncStarter[R]:
        """The blocking twin of this object, for code that cannot await."""
        from flowfabric.sdk.keys.keyed_sync import SyncStarter

        return SyncStarter(self, self._task.app.portal())

    async def run(self) -> Run[R]:
        """Return the run that has the key; create it if there is none."""
        return await self._task.start_at(self._key, self._call, None)

    async def signal(self, name: str, value: Any = None) -> Run[R]:
        """Send a message to the run that has the key, or create one with it; return the run."""
        engine = await self._task.app.engine()
        return await self._task.start_at(self._key, self._call, self._message(engine, name, value))

    @overload
    async def ask(self, name: str, value: Any, shape: type[T], *, timeout: Duration | None = None) -> T: ...
    @overload
    async def ask(self, name: str, value: Any = None, shape: Any = Any, *, timeout: Duration | None = None) -> Any: ...
    async def ask(self, name: str, value: Any = None, shape: Any = Any, *, timeout: Duration | None = None) -> Any:
        """Send a message like `signal`, and return the reply of the handler, as `Run.ask` does."""
        codec = incoming_codec(shape, f"ask {name}")
        engine = await self._task.app.engine()
        message = replace(self._message(engine, name, value), wants_reply=True)
        try:
            run = await self._task.start_at(self._key, self._call, message)
        except TargetNotSignalable:
            if (ended := await self._task.find(self._key)) is None:
                raise
            raise await not_answered(engine, ended) from None
        reply = await read_answer(engine, replace(message, execution_id=run.id), to_seconds(timeout), run)
        return codec.load(from_json(reply.payload or b"null"), f"reply to {name}")

    def _message(self, engine: EngineAPI, name: str, value: Any) -> MessageArgs:
        if not name:
            raise InvalidInput(f"signal: {name!r} is no name")
        return make_message(engine, self._task.app, self._task.name, "", name, value)
