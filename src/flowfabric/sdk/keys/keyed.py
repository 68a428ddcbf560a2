"""`Keyed`: the run that has a key, addressed without a round trip and created by the first message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from msgspec.structs import replace

from flowfabric.engine.types import KeyPolicy, KeyUntil, MessageArgs
from flowfabric.errors import InvalidInput, NotFound, TargetNotSignalable
from flowfabric.sdk.answers import make_message, not_answered, read_answer
from flowfabric.sdk.durations import Duration, to_seconds
from flowfabric.sdk.run import Run, RunMethods
from flowfabric.sdk.serialization.values import from_json, incoming_codec

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.sdk.call import Call
    from flowfabric.sdk.keys.keyed_sync import SyncKeyed, SyncStarter
    from flowfabric.sdk.task import Task

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

ACTOR = KeyPolicy(until=KeyUntil.ENDED)  # policy of a task without a key of its own


class Keyed(RunMethods[R], Generic[P, R]):
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

    async def _target(self) -> tuple[Run[R], EngineAPI]:
        return await self.run(), await self.task.app.engine()

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
