"""`Run`: a client's handle of an execution, for its result, state, output, messages and approvals."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import parse_qs, urlsplit

import msgspec

from flowfabric import errors
from flowfabric.engine.types import Accepted, MessageArgs, SignalArgs, WaitpointToken
from flowfabric.model.states import PublicState, TerminalOutcome
from flowfabric.sdk.approvals import ApprovalLink
from flowfabric.sdk.durable.output import START_CURSOR, progress_document
from flowfabric.sdk.durations import Duration, to_seconds
from flowfabric.sdk.exceptions import RunCancelled, RunExpired, RunFailed, RunSkipped
from flowfabric.sdk.serialization.values import ValueCodec, json_bytes, to_plain

if TYPE_CHECKING:
    from flowfabric.engine.operations.pages import ExecutionOutcome
    from flowfabric.engine.types import ExecutionSnapshot
    from flowfabric.engine_api import EngineAPI
    from flowfabric.model.answers.execution import AttemptView
    from flowfabric.model.obstacles import Explanation
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.sync import SyncRun

R = TypeVar("R")

TAIL_WAIT_MS = 10_000
logger = logging.getLogger("flowfabric.worker")

MAX_POLL_MS = 30_000

_ERROR_BY_OUTCOME = {
    TerminalOutcome.FAILED: RunFailed,
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


class Run(Generic[R]):
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

    async def result(self, timeout: Duration | None = None) -> R:
        """Wait for the end of the run and return what its handler returned.

        Raises `RunFailed`, `RunCancelled`, `RunExpired` or `RunSkipped` if the run ended without success, and
        `TimeoutError` if it has not ended within `timeout`; the run itself continues.
        """
        timeout_s = to_seconds(timeout)
        engine = await self._engine()
        clock = asyncio.get_running_loop().time
        give_up_at = None if timeout_s is None else clock() + timeout_s
        max_poll_ms = max(MAX_POLL_MS, engine.settings.poll_ms)
        await asyncio.sleep(0)  # lets the wakeup of a submit just before reach local workers first
        has_warned = False
        while True:
            left_ms = max_poll_ms if give_up_at is None else max(0, int((give_up_at - clock()) * 1000))
            outcome = await engine.await_end(self.id, max_wait_ms=min(left_ms, max_poll_ms))
            if outcome is not None:
                return await self._value(engine, outcome)
            if give_up_at is not None and clock() >= give_up_at:
                raise self.timeout_error(timeout_s)
            if not has_warned:
                has_warned = True
                self._warn_if_slot_is_held()

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
        error.add_note(f"run.explain() or `ff explain {self.id}` tells what it waits for; is a worker running?")
        return error

    async def state(self) -> PublicState:
        """Return its public state, such as `waiting`, `active` or `completed`."""
        state = await (await self._engine()).read_execution_state(self.id)
        if state is None:
            raise errors.NotFound("execution", execution_id=self.id)
        return state

    async def describe(self) -> ExecutionSnapshot:
        """Return a snapshot of the run: its state, times, attempts, lease and tags."""
        snapshot = await (await self._engine()).describe_execution(self.id)
        if snapshot is None:
            raise errors.NotFound("execution", execution_id=self.id)
        return snapshot

    async def attempts(self) -> list[AttemptView]:
        """Return all attempts so far, the first one first."""
        history = await (await self._engine()).attempt_history(self.id)
        if not history:
            await self.state()  # raises NotFound if there is no such run
        return history

    async def cancel(self, reason: str = "") -> None:
        """Cancel the run, whatever its state. Idempotent."""
        with self._name_missing_run():
            await (await self._engine()).cancel_execution(self.id, reason=reason)

    async def replay(self) -> None:
        """Run a finished run again, under the same id."""
        with self._name_missing_run():
            await (await self._engine()).replay_execution(self.id)

    async def explain(self) -> Explanation:
        """Return why it is not running: a dependency, a delay, a limit, a budget, no capable worker, all busy …"""
        with self._name_missing_run():
            return await (await self._engine()).explain(self.id)

    async def signal(self, name: str, value: Any = None, *, key: str | None = None, token: str | None = None) -> bool:
        """Send a message to its handler, which receives it with `ctx.receive(name)`, now or later.

        A message with the same `key` is delivered once. With a `token` (or the link that contains it) the value answers
        the approval of that name instead. Returns False if nothing changed, because it was sent before.
        """
        engine = await self._engine()
        if token is not None:
            if "token=" in token:
                return await self.vote(token, value)
            return await self._vote_at(engine, name, token, value)
        message = MessageArgs(
            execution_id=self.id,
            mailbox=name,
            message_id=engine.minter.uuid(),
            payload=json_bytes(to_plain(value)),
            payload_encoding="json",
            idempotency_key=key,
        )
        with self._name_missing_run():
            answer = await engine.send_message(message)
        return isinstance(answer, Accepted)

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

    async def vote(self, link: str, value: Any = True, *, by: str = "") -> bool:
        """Answer an approval of this run with one of its links; a value of the wrong type raises `InvalidInput`.

        Returns False if the vote does not count, because this link has voted before: the first vote stands.
        """
        waitpoint_id, token = _parse_link(link)
        engine = await self._engine()
        answer = await engine.deliver_signal(
            SignalArgs(
                execution_id=self.id,
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
        engine = await self._engine()
        attempt, position = (0, START_CURSOR) if after is None else _parse_cursor(after)
        await self.state()  # raises when there is no such run
        has_ended = False
        while True:
            page = await engine.tail_stream(self.id, attempt, position, count_limit=1000)
            for frame in page.frames:
                position = frame.id
                if frame.fields.get("frame_type") == name:
                    yield OutputFrame(_decode_text(frame.fields), attempt, f"{attempt}/{frame.id}")
            if page.frames:
                continue
            latest = await engine.read_current_attempt_index(self.id)
            if latest > attempt:
                attempt, position = latest, START_CURSOR
                yield Reset(attempt)
            elif has_ended:
                return
            elif page.closed_at is None:
                has_ended = await self._wait_for_output(engine, attempt, position)
            else:  # this attempt has finished, and the next one has not started
                has_ended = await self._wait_for_output(engine, attempt + 1, START_CURSOR)

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

    async def progress(self) -> dict[str, Any]:
        """Return the progress that its handler last reported, as one document; `pct` is the percentage."""
        return progress_document(*await (await self._engine()).read_progress(self.id))

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
            raise _ERROR_BY_OUTCOME.get(outcome.outcome, RunFailed)(self.id, self.task, outcome.reason, last)
        value: R = self._codec.from_json(outcome.result, "result")
        return value

    def __repr__(self) -> str:
        return f"<Run {self.task} {self.id}>"


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


def _decode_text(fields: Mapping[str, str]) -> str:
    payload = fields.get("payload", "")
    if fields.get("encoding") == "base64":
        return base64.b64decode(payload).decode("utf-8", "replace")
    return payload
