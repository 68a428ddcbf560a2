"""`Run`: a client's handle of an execution, for its result, state, output, messages and approvals."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload
from urllib.parse import parse_qs, urlsplit

import msgspec

from flowfabric import errors
from flowfabric.engine.types import Accepted, MessageArgs, SignalArgs, WaitpointToken
from flowfabric.model.states import PublicState, TerminalOutcome
from flowfabric.sdk.answers import MAX_POLL_MS, Deadline, make_message, read_answer, read_first
from flowfabric.sdk.approvals import ApprovalLink
from flowfabric.sdk.durable.output import START_CURSOR, progress_document
from flowfabric.sdk.durations import Duration, to_seconds
from flowfabric.sdk.exceptions import RunCancelled, RunExpired, RunFailed, RunSkipped
from flowfabric.sdk.serialization.failures import make_exception
from flowfabric.sdk.serialization.values import ValueCodec, from_json, incoming_codec, json_bytes, to_plain

if TYPE_CHECKING:
    from flowfabric.engine.operations.pages import ExecutionOutcome
    from flowfabric.engine.types import ExecutionSnapshot
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.model.answers.execution import AttemptView
    from flowfabric.model.obstacles import Explanation
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.sync import SyncRun
    from flowfabric.sdk.task import Task

R = TypeVar("R")
T = TypeVar("T")

TAIL_WAIT_MS = 10_000
logger = logging.getLogger("flowfabric.worker")


_ERROR_BY_OUTCOME = {
    TerminalOutcome.CANCELLED: RunCancelled,
    TerminalOutcome.EXPIRED: RunExpired,
    TerminalOutcome.SKIPPED: RunSkipped,
}


class OutputFrame(msgspec.Struct, frozen=True):
    """A piece of output. Pass its `cursor` as `after` to continue behind it."""

    text: str
    attempt: int
    cursor: str


class Reset(msgspec.Struct, frozen=True):
    """Marks in a stream that the output starts over, because a later attempt replaces the previous one."""

    attempt: int


class RunMethods(Generic[R]):
    """What can be done with a run, whether it is known by its id or by its key."""

    async def _target(self) -> tuple[Run[R], EngineAPI]:
        """Return the run and the engine; raises `NotFound` if there is no run."""
        raise NotImplementedError

    async def result(self, timeout: Duration | None = None) -> R:
        """Wait for the end of the run and return what its handler returned.

        Raises `RunFailed`, `RunCancelled`, `RunExpired` or `RunSkipped` if the run ended without success, and
        `TimeoutError` if it has not ended within `timeout`; the run itself continues. The cause of a `RunFailed` is the
        exception of the last attempt, if its class is loaded here.
        """
        run, engine = await self._target()
        timeout_s = to_seconds(timeout)
        deadline = Deadline(timeout_s, max_poll_ms=max(MAX_POLL_MS, engine.settings.poll_ms))
        await asyncio.sleep(0)  # lets the wakeup of a submit just before reach local workers first
        has_warned = False
        while True:
            outcome = await engine.await_end(run.id, max_wait_ms=deadline.left_ms)
            if outcome is not None:
                return await run._value(engine, outcome)
            if not deadline.left_ms:
                raise run.timeout_error(timeout_s)
            if not has_warned:
                has_warned = True
                run._warn_if_slot_is_held()

    async def state(self) -> PublicState:
        """Return its public state, such as `waiting`, `active` or `completed`."""
        run, engine = await self._target()
        state = await engine.read_execution_state(run.id)
        if state is None:
            raise errors.NotFound("execution", execution_id=run.id)
        return state

    async def describe(self) -> ExecutionSnapshot:
        """Return a snapshot of the run: its state, times, attempts, lease and tags."""
        run, engine = await self._target()
        snapshot = await engine.describe_execution(run.id)
        if snapshot is None:
            raise errors.NotFound("execution", execution_id=run.id)
        return snapshot

    async def attempts(self) -> list[AttemptView]:
        """Return all attempts so far, the first one first."""
        run, engine = await self._target()
        history = await engine.attempt_history(run.id)
        if not history:
            await run.state()  # raises NotFound if there is no such run
        return history

    async def cancel(self, reason: str = "") -> None:
        """Cancel the run, whatever its state. Idempotent."""
        run, engine = await self._target()
        with run._name_missing_run():
            await engine.cancel_execution(run.id, reason=reason)

    async def replay(self) -> None:
        """Run a finished run again, under the same id."""
        run, engine = await self._target()
        with run._name_missing_run():
            await engine.replay_execution(run.id)

    async def release(self, *, accept: bool = False) -> bool:
        """Let a run continue that is held because its function has changed; False if it is not held.

        With `accept` it takes the new way, at the place where it was held.
        """
        run, engine = await self._target()
        with run._name_missing_run():
            return await engine.release_held(run.id, accept=accept)

    async def unpin(self, to: str | None = None) -> bool:
        """Let workers of any version continue a pinned run, or those of the version `to`; False if nothing changes."""
        run, engine = await self._target()
        with run._name_missing_run():
            return await engine.unpin(run.id, version=to)

    async def explain(self) -> Explanation:
        """Return why it is not running: a dependency, a delay, a limit, a budget, no capable worker, all busy …"""
        run, engine = await self._target()
        with run._name_missing_run():
            return await engine.explain(run.id)

    async def signal(self, name: str, value: Any = None, *, key: str | None = None, token: str | None = None) -> bool:
        """Send a message to its handler, which receives it with `ctx.receive(name)`, now or later.

        A message with the same `key` is delivered once. With a `token` (or the link that contains it) the value answers
        the approval of that name instead. Returns False if nothing changed, because it was sent before.
        """
        run, engine = await self._target()
        if token is not None:
            if "token=" in token:
                return await run.vote(token, value)
            return await run._vote_at(engine, name, token, value)
        with run._name_missing_run():
            answer = await engine.send_message(run._message(engine, name, value, key))
        return isinstance(answer, Accepted)

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
        """Send a message and return the reply of its handler, as this type; the message is sent once.

        Raises `Refused` if the handler refuses it, `NotAnswered` if the run ends without a reply, and `TimeoutError` if
        there is none in time; the message stays sent. With the same `key` it is the same question: it is not sent
        again, and has the same answer for as long as the run is kept.
        """
        run, engine = await self._target()
        codec = incoming_codec(shape, f"ask {name}")
        reply = await read_answer(engine, run._message(engine, name, value, key), to_seconds(timeout), run)
        return codec.load(from_json(reply.payload or b"null"), f"reply to {name}")

    @overload
    async def get(self, name: str, shape: type[T], *, wait: Duration) -> T: ...
    @overload
    async def get(self, name: str, shape: type[T], *, wait: None = None) -> T | None: ...
    @overload
    async def get(self, name: str, shape: Any = Any, *, wait: Duration | None = None) -> Any: ...
    async def get(self, name: str, shape: Any = Any, *, wait: Duration | None = None) -> Any:
        """Return the fact of this name as this type, of a run in any state; None if its handler has set none.

        With `wait`, wait for the first value; raises `TimeoutError` if there is none in time, or the run ends before.
        """
        run, engine = await self._target()
        codec = incoming_codec(shape, f"get {name}")
        with run._name_missing_run():
            fact = await read_first(engine, run, name, to_seconds(wait))
        return None if fact is None else codec.load(from_json(fact.value), name)

    @overload
    def watch(self, name: str, shape: type[T]) -> AsyncIterator[T]: ...
    @overload
    def watch(self, name: str, shape: Any = Any) -> AsyncIterator[Any]: ...
    async def watch(self, name: str, shape: Any = Any) -> AsyncIterator[Any]:
        """Iterate over the values of a fact, from the present one until the run ends.

        Values that are replaced faster than they are read are left out; none comes back.
        """
        run, engine = await self._target()
        codec = incoming_codec(shape, f"watch {name}")
        seen = 0
        while True:
            with run._name_missing_run():
                reading = await engine.read_fact(run.id, name, after=seen, max_wait_ms=MAX_POLL_MS)
            if reading.fact is not None:
                seen = reading.fact.number
                yield codec.load(from_json(reading.fact.value), name)
            elif reading.has_ended:
                return

    async def vote(self, link: str, value: Any = True, *, by: str = "") -> bool:
        """Answer an approval of this run with one of its links; a value of the wrong type raises `InvalidInput`.

        Returns False if the vote does not count, because this link has voted before: the first vote is kept.
        """
        run, engine = await self._target()
        waitpoint_id, token = _parse_link(link)
        answer = await engine.deliver_signal(
            SignalArgs(
                execution_id=run.id,
                waitpoint_id=waitpoint_id,
                signal_id=engine.minter.uuid(),
                signal_name="vote",
                waitpoint_token=WaitpointToken(token),
                signal_category="approval",
                source_type="person",
                source_identity=by,
                payload=json_bytes(to_plain(value)),
            )
        )
        return isinstance(answer, Accepted) and answer.is_useful

    async def stream(self, name: str, *, after: str | None = None) -> AsyncIterator[OutputFrame | Reset]:
        """Iterate over what its handler writes to this output, until the run ends.

        Starts at the beginning, or behind the frame with the cursor `after`. A `Reset` precedes the output of an
        attempt that replaces an earlier one.
        """
        run, engine = await self._target()
        attempt, position = (0, START_CURSOR) if after is None else _parse_cursor(after)
        await run.state()  # raises when there is no such run
        has_ended = False
        while True:
            page = await engine.tail_stream(run.id, attempt, position, count_limit=1000)
            for frame in page.frames:
                position = frame.id
                if frame.fields.get("frame_type") == name:
                    yield OutputFrame(frame_text(frame.fields), attempt, f"{attempt}/{frame.id}")
            if page.frames:
                continue
            latest = await engine.read_current_attempt_index(run.id)
            if latest > attempt:
                attempt, position = latest, START_CURSOR
                yield Reset(attempt)
            elif has_ended:
                return
            elif page.closed_at is None:
                has_ended = await run._wait_for_output(engine, attempt, position)
            else:  # this attempt has finished, and the next one has not started
                has_ended = await run._wait_for_output(engine, attempt + 1, START_CURSOR)

    async def progress(self) -> dict[str, Any]:
        """Return the progress that its handler last reported, as one document; `pct` is the percentage."""
        run, engine = await self._target()
        return progress_document(*await engine.read_progress(run.id))


class Run(RunMethods[R]):
    """A submitted call of a task. Any process that knows its id can watch and control it."""

    def __init__(
        self,
        run_id: str,
        task: str,
        codec: ValueCodec,
        app: Fabric,
        *,
        created: bool = True,
        namespace: str | None = None,
    ) -> None:
        self.id = run_id
        self.task = task
        self.created = created  # False if the submit returned the run of an earlier submit with the same key
        self._namespace = namespace  # the namespace it must belong to; None if the caller supplied the id
        self._codec = codec
        self._app = app
        self._engine = app.engine

    @property
    def sync(self) -> SyncRun[R]:
        """The blocking twin of this object, for code that cannot await."""
        from flowfabric.sdk.sync import SyncRun

        return SyncRun(self, self._app.portal())

    async def _target(self) -> tuple[Run[R], EngineAPI]:
        return self, await self._engine()

    def _warn_if_slot_is_held(self) -> None:
        """Log that a handler waits here: if handlers in all slots wait for other runs, none of them can finish."""
        from flowfabric.sdk.context import current

        with suppress(RuntimeError):  # no handler is running
            waiter = current()
            hint = "ctx.spawn gives the slot back meanwhile"
            logger.warning("%s: %s holds its slot while it waits for %s; %s", waiter.run_id, waiter.task, self.id, hint)

    def timeout_error(self, after_s: float | None) -> TimeoutError:
        """Return the error for a caller that has waited `after_s` seconds for the end."""
        error = TimeoutError(f"{self.task} {self.id} has not ended after {after_s:g} s; it continues to run")
        error.add_note(f"run.explain() or `ff explain {self.id}` says what it waits for; is a worker running?")
        return error

    def _message(self, engine: EngineAPI, name: str, value: Any, key: str | None) -> MessageArgs:
        return make_message(engine, self._app, self.task, self.id, name, value, key)

    async def _vote_at(self, engine: EngineAPI, name: str, token: str, value: Any) -> bool:
        """Answer the open approval that the token belongs to, found by its fingerprint."""
        after, wanted = None, WaitpointToken(token)
        while True:
            page = await engine.list_pending_waitpoints(self.id, after=after)
            for entry in page.entries:
                is_match = (entry.token_kid, entry.token_fingerprint) == (wanted.kid, wanted.fingerprint)
                if is_match and entry.waitpoint_key.rpartition(".")[0] == name:
                    return await self.vote(
                        ApprovalLink.for_waitpoint(self._app.public_url, self.id, entry.waitpoint_id, token), value
                    )
            if (after := page.next_cursor) is None:
                raise errors.InvalidInput(f"token: no open approval {name!r} of this run has it")

    async def _wait_for_output(self, engine: EngineAPI, attempt: int, position: str) -> bool:
        """Wait for more output of an attempt or for the end of the run; True if the run has ended."""
        more = asyncio.ensure_future(
            engine.tail_stream(self.id, attempt, position, block_ms=TAIL_WAIT_MS, count_limit=1)
        )
        end = asyncio.ensure_future(engine.await_end(self.id, max_wait_ms=TAIL_WAIT_MS))
        try:
            await asyncio.wait((more, end), return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                return end.result() is not None
            more.result()
            return False
        finally:
            for waiting in (more, end):
                waiting.cancel()
            await asyncio.gather(more, end, return_exceptions=True)

    @contextmanager
    def _name_missing_run(self) -> Iterator[None]:
        """Add this run's id to a `NotFound` that carries none."""
        try:
            yield
        except errors.NotFound as missing:
            if missing.execution_id is not None:
                raise
            raise errors.NotFound(missing.entity, execution_id=self.id) from None

    async def _value(self, engine: EngineAPI, outcome: ExecutionOutcome) -> R:
        if None not in (self._namespace, outcome.namespace) and self._namespace != outcome.namespace:
            raise errors.IdInOtherNamespace(execution_id=self.id)
        if outcome.outcome is not TerminalOutcome.SUCCESS:
            attempts = 0
            with suppress(errors.FabricError):
                attempts = await engine.read_total_attempt_count(self.id)
            last = attempts - 1 if attempts else None
            if (error := _ERROR_BY_OUTCOME.get(outcome.outcome)) is not None:
                raise error(self.id, self.task, outcome.reason, last)
            cause = None if outcome.failure is None else make_exception(outcome.failure)
            raise RunFailed(self.id, self.task, outcome.reason, last, failure=outcome.failure) from cause
        return self.decode(outcome.result)

    def decode(self, result: bytes | None) -> R:
        """Decode what its handler returned."""
        value: R = self._codec.from_json(result, "result")
        return value

    def __repr__(self) -> str:
        return f"<Run {self.task} {self.id}>"


class BatchedRun(Run[R]):
    """A submit that became one input of a batch: its result is its own, everything else is the batch's."""

    def __init__(self, task: Task[..., R], run_id: str, item: int, *, created: bool) -> None:
        codec, namespace = task.signature.result_codec, task.app.namespace
        super().__init__(run_id, task.name, codec, task.app, created=created, namespace=namespace)
        self.item = item  # its place among the inputs

    def decode(self, result: bytes | None) -> R:
        """Decode what the handler returned for this input."""
        values = msgspec.json.decode(result or b"[]", type=list[msgspec.Raw])
        value: R = self._codec.from_json(bytes(values[self.item]), "result")
        return value


def _parse_cursor(text: str) -> tuple[int, str]:
    attempt, separator, position = text.partition("/")
    if not separator or not attempt.isdecimal():
        raise errors.InvalidInput(f"after: {text!r} is no cursor of a frame")
    return int(attempt), position


def _parse_link(link: str) -> tuple[str, str]:
    """Return the waitpoint id and the token of an approval link."""
    parts = urlsplit(link)
    tokens = parse_qs(parts.query).get("token")
    if not tokens:
        raise errors.InvalidInput("link: it has no token")
    return parts.path.rsplit("/", 1)[-1], tokens[0]


def frame_text(fields: Mapping[str, str]) -> str:
    """Return the text of a frame."""
    payload = fields.get("payload", "")
    if fields.get("encoding") == "base64":
        return base64.b64decode(payload).decode("utf-8", "replace")
    return payload
