"""A run: the handle that a caller keeps of work it submitted."""

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
    from flowfabric.engine.claiming.poller import ExecutionOutcome
    from flowfabric.engine.operations.reads import ExecutionSnapshot
    from flowfabric.engine_api import EngineAPI
    from flowfabric.model.answers.execution import AttemptView
    from flowfabric.model.obstacles import Explanation
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.sync import SyncRun

R = TypeVar("R")

TAIL_WAIT_MS = 10_000
logger = logging.getLogger("flowfabric.worker")

MAX_POLL_MS = 30_000

_ENDS = {
    TerminalOutcome.FAILED: RunFailed,
    TerminalOutcome.CANCELLED: RunCancelled,
    TerminalOutcome.EXPIRED: RunExpired,
    TerminalOutcome.SKIPPED: RunSkipped,
}


class OutputFrame(msgspec.Struct, frozen=True):
    """A piece of output."""

    text: str
    attempt: int
    cursor: str


class Reset(msgspec.Struct, frozen=True):
    """The output begins anew: this attempt took the place of the one before."""

    attempt: int


class Run(Generic[R]):
    """One submitted piece of work. It can be looked at from any process that knows its id."""

    def __init__(
        self,
        run_id: str,
        task: str,
        shape: ValueCodec,
        app: Fabric,
        *,
        created: bool = True,
        namespace: str | None = None,
    ) -> None:
        self.id = run_id
        self.task = task
        self.created = created  # False when an earlier submit with the same key stands for this one
        self._namespace = namespace  # that it must belong to; None for an id that the caller brought
        self._shape = shape
        self._app = app
        self._engine = app.engine

    @property
    def sync(self) -> SyncRun[R]:
        """The same for code that cannot await."""
        from flowfabric.sdk.sync import SyncRun

        return SyncRun(self, self._app.portal())

    async def result(self, timeout: Duration | None = None) -> R:
        """What the handler returned; raises RunFailed, RunCancelled, RunExpired, RunSkipped or TimeoutError."""
        longest_s = to_seconds(timeout)
        engine = await self._engine()
        clock = asyncio.get_running_loop().time
        until = None if longest_s is None else clock() + longest_s
        longest_ms = max(MAX_POLL_MS, engine.settings.poll_ms)
        await asyncio.sleep(0)  # workers hear of what was just submitted before this looks at it
        is_told = False
        while True:
            left_ms = longest_ms if until is None else max(0, int((until - clock()) * 1000))
            ended = await engine.await_end(self.id, max_wait_ms=min(left_ms, longest_ms))
            if ended is not None:
                return await self._value(engine, ended)
            if until is not None and clock() >= until:
                raise self.not_ended(longest_s)
            if not is_told:
                is_told = True
                self._tell_whose_slot_is_held()

    def _tell_whose_slot_is_held(self) -> None:
        """When handlers hold all slots while they wait for others, none of them ever ends."""
        from flowfabric.sdk.context import current

        with suppress(RuntimeError):  # nobody's
            who = current()
            hint = "ctx.spawn gives the slot back meanwhile"
            logger.warning("%s: %s holds its slot while it waits for %s; %s", who.run_id, who.task, self.id, hint)

    def not_ended(self, after_s: float | None) -> TimeoutError:
        """What whoever waited so long for its end is told."""
        told = TimeoutError(f"{self.task} {self.id} has not ended after {after_s:g} s; it goes on all the same")
        told.add_note(f"run.explain() or `ff explain {self.id}` tells what it waits for; is a worker running?")
        return told

    async def state(self) -> PublicState:
        """The one public word for what it is doing."""
        state = await (await self._engine()).read_execution_state(self.id)
        if state is None:
            raise errors.NotFound("execution", execution_id=self.id)
        return state

    async def describe(self) -> ExecutionSnapshot:
        """Everything people want to know of it."""
        snapshot = await (await self._engine()).describe_execution(self.id)
        if snapshot is None:
            raise errors.NotFound("execution", execution_id=self.id)
        return snapshot

    async def attempts(self) -> list[AttemptView]:
        """Every attempt so far."""
        history = await (await self._engine()).attempt_history(self.id)
        if not history:
            await self.state()  # raises when there is no such run
        return history

    async def cancel(self, reason: str = "") -> None:
        """End it, whatever it is doing; again is fine."""
        with self._named():
            await (await self._engine()).cancel_execution(self.id, reason=reason)

    async def replay(self) -> None:
        """Give a finished run another life."""
        with self._named():
            await (await self._engine()).replay_execution(self.id)

    async def explain(self) -> Explanation:
        """Why it is not running: a dependency, a delay, a limit, a budget, no capable worker, all busy …"""
        with self._named():
            return await (await self._engine()).explain(self.id)

    async def signal(self, name: str, value: Any = None, *, key: str | None = None, token: str | None = None) -> bool:
        """Send a message to its function, which gets it with `ctx.receive(name)`, now or later; `key` sends it once.

        With a `token` (or the link it came in) it answers the approval of that name instead. False when it changes
        nothing, because it was sent before.
        """
        engine = await self._engine()
        if token is not None:
            if "token=" in token:
                return await self.vote(token, value)
            return await self._vote_at(engine, name, token, value)
        mail = MessageArgs(
            execution_id=self.id,
            mailbox=name,
            message_id=engine.minter.uuid(),
            payload=json_bytes(to_plain(value)),
            payload_encoding="json",
            idempotency_key=key,
        )
        with self._named():
            sent = await engine.send_message(mail)
        return isinstance(sent, Accepted)

    async def _vote_at(self, engine: EngineAPI, name: str, token: str, value: Any) -> bool:
        """Answer the open approval that this token is for, found by its fingerprint: no other is tried with it."""
        after, wanted = None, WaitpointToken(token)
        while True:
            page = await engine.list_pending_waitpoints(self.id, after=after)
            for point in page.entries:
                is_its = (point.token_kid, point.token_fingerprint) == (wanted.kid, wanted.fingerprint)
                if is_its and point.waitpoint_key.rpartition(".")[0] == name:
                    return await self.vote(
                        ApprovalLink.for_waitpoint(self._app.public_url, self.id, point.waitpoint_id, token), value
                    )
            if (after := page.next_cursor) is None:
                raise errors.InvalidInput(f"token: no open approval {name!r} of this run has it")

    async def vote(self, link: str, value: Any = True, *, by: str = "") -> bool:
        """Answer an approval of this run with one of its links; `InvalidInput` when it asks for something else.

        False when the vote does not count, because this link has voted before: the first vote stands.
        """
        waitpoint_id, token = _parts(link)
        engine = await self._engine()
        sent = await engine.deliver_signal(
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
        return isinstance(sent, Accepted) and sent.is_useful

    async def stream(self, name: str, *, after: str | None = None) -> AsyncIterator[OutputFrame | Reset]:
        """What its handler writes under this name, from the beginning or after a frame's cursor, until the run ends.

        `Reset` comes before the output of an attempt that takes the place of an earlier one.
        """
        engine = await self._engine()
        attempt, place = (0, START_CURSOR) if after is None else _cursor(after)
        await self.state()  # raises when there is no such run
        has_ended = False
        while True:
            page = await engine.tail_stream(self.id, attempt, place, count_limit=1000)
            for frame in page.frames:
                place = frame.id
                if frame.fields.get("frame_type") == name:
                    yield OutputFrame(_text(frame.fields), attempt, f"{attempt}/{frame.id}")
            if page.frames:
                continue
            latest = await engine.read_current_attempt_index(self.id)
            if latest > attempt:
                attempt, place = latest, START_CURSOR
                yield Reset(attempt)
            elif has_ended:
                return
            elif page.closed_at is None:
                has_ended = await self._news(engine, attempt, place)
            else:  # this attempt is over, and the next one has not begun
                has_ended = await self._news(engine, attempt + 1, START_CURSOR)

    async def _news(self, engine: EngineAPI, attempt: int, place: str) -> bool:
        """Wait for more output of an attempt, or for the end; whether that came."""
        more = asyncio.ensure_future(engine.tail_stream(self.id, attempt, place, block_ms=TAIL_WAIT_MS, count_limit=1))
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
        """What its handler last said, as one document; `pct` is the percentage."""
        return progress_document(*await (await self._engine()).read_progress(self.id))

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Let a refusal say which run there is not."""
        try:
            yield
        except errors.NotFound as missing:
            if missing.execution_id is not None:
                raise
            raise errors.NotFound(missing.entity, execution_id=self.id) from None

    async def _value(self, engine: EngineAPI, ended: ExecutionOutcome) -> R:
        if None not in (self._namespace, ended.namespace) and self._namespace != ended.namespace:
            raise errors.IdInOtherNamespace(execution_id=self.id)
        if ended.outcome is not TerminalOutcome.SUCCESS:
            attempts = 0
            with suppress(errors.FabricError):
                attempts = await engine.read_total_attempt_count(self.id)
            last = attempts - 1 if attempts else None
            raise _ENDS.get(ended.outcome, RunFailed)(self.id, self.task, ended.reason, last)
        value: R = self._shape.from_json(ended.result, "result")
        return value

    def __repr__(self) -> str:
        return f"<Run {self.task} {self.id}>"


def _cursor(text: str) -> tuple[int, str]:
    attempt, found, place = text.partition("/")
    if not found or not attempt.isdecimal():
        raise errors.InvalidInput(f"after: {text!r} is no cursor of a frame")
    return int(attempt), place


def _parts(link: str) -> tuple[str, str]:
    """The waitpoint and the token of an approval's link."""
    parts = urlsplit(link)
    tokens = parse_qs(parts.query).get("token")
    if not tokens:
        raise errors.InvalidInput("link: it has no token")
    return parts.path.rsplit("/", 1)[-1], tokens[0]


def _text(fields: Mapping[str, str]) -> str:
    payload = fields.get("payload", "")
    if fields.get("encoding") == "base64":
        return base64.b64decode(payload).decode("utf-8", "replace")
    return payload
