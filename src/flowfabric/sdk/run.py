"""A run: the handle that a caller keeps of work it submitted."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import parse_qs, urlsplit

import msgspec

from flowfabric import errors
from flowfabric.engine.asks import MailArgs, SignalArgs, WaitpointToken
from flowfabric.model.states import PublicState, TerminalOutcome
from flowfabric.sdk.codec import Shape, from_json, json_bytes
from flowfabric.sdk.failing import RunCancelled, RunExpired, RunFailed, RunSkipped

if TYPE_CHECKING:
    from flowfabric.engine.engine import Engine
    from flowfabric.engine.pulling import Ended
    from flowfabric.engine.reads import ExecutionSnapshot
    from flowfabric.model.answers import AttemptView

R = TypeVar("R")

TAIL_MS = 10_000

LONGEST_LOOK_MS = 30_000

_ENDS = {
    TerminalOutcome.FAILED: RunFailed,
    TerminalOutcome.CANCELLED: RunCancelled,
    TerminalOutcome.EXPIRED: RunExpired,
    TerminalOutcome.SKIPPED: RunSkipped,
}


class Frame(msgspec.Struct, frozen=True):
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
        self, run_id: str, task: str, shape: Shape, engine: Callable[[], Awaitable[Engine]], *, created: bool = True
    ) -> None:
        self.id = run_id
        self.task = task
        self.created = created  # False when an earlier submit with the same key stands for this one
        self._shape = shape
        self._engine = engine

    async def result(self, timeout: float | None = None) -> R:
        """What the handler returned; raises RunFailed, RunCancelled, RunExpired, RunSkipped or TimeoutError."""
        engine = await self._engine()
        clock = asyncio.get_running_loop().time
        until = None if timeout is None else clock() + timeout
        longest_ms = max(LONGEST_LOOK_MS, engine.settings.poll_ms)
        while True:
            left_ms = longest_ms if until is None else max(0, int((until - clock()) * 1000))
            ended = await engine.await_end(self.id, max_wait_ms=min(left_ms, longest_ms))
            if ended is not None:
                return self._value(ended)
            if until is not None and clock() >= until:
                raise TimeoutError(f"{self.task} {self.id} has not ended after {timeout} s; it goes on all the same")

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
        return await (await self._engine()).attempt_history(self.id)

    async def cancel(self, reason: str = "") -> None:
        """End it, whatever it is doing; again is fine."""
        await (await self._engine()).cancel_execution(self.id, reason=reason)

    async def replay(self) -> None:
        """Give a finished run another life."""
        await (await self._engine()).replay_execution(self.id)

    async def signal(self, name: str, value: Any = None, *, key: str | None = None) -> None:
        """Send a message to its function, which gets it with `ctx.receive(name)`, now or later; `key` sends it once."""
        engine = await self._engine()
        await engine.send_message(
            MailArgs(
                execution_id=self.id,
                mailbox=name,
                message_id=engine.minter.uuid(),
                payload=json_bytes(msgspec.to_builtins(value)),
                payload_encoding="json",
                idempotency_key=key,
            )
        )

    async def vote(self, link: str, value: Any = True, *, by: str = "") -> None:
        """Answer an approval of this run with one of its links."""
        waitpoint_id, token = _parts(link)
        engine = await self._engine()
        await engine.deliver_signal(
            SignalArgs(
                execution_id=self.id,
                waitpoint_id=waitpoint_id,
                signal_id=engine.minter.uuid(),
                signal_name="vote",
                waitpoint_token=WaitpointToken(token),
                signal_category="approval",
                source_type="person",
                source_identity=by,
                payload=json_bytes(msgspec.to_builtins(value)),
            )
        )

    async def stream(self, name: str) -> AsyncIterator[Frame | Reset]:
        """What its handler writes under this name, from the beginning, until the run ends."""
        engine = await self._engine()
        attempt, after = 0, "0-0"
        while True:
            page = await engine.tail_stream(self.id, attempt, after, block_ms=TAIL_MS, count_limit=1000)
            for frame in page.frames:
                after = frame.id
                if frame.fields.get("frame_type") == name:
                    yield Frame(_text(frame.fields), attempt, frame.id)
            if page.frames:
                continue
            latest = await engine.read_current_attempt_index(self.id)
            if latest > attempt:
                attempt, after = latest, "0-0"
                yield Reset(attempt)
            elif page.closed_at is not None or (await engine.await_end(self.id)) is not None:
                return

    async def progress(self) -> tuple[int | None, str | None]:
        """What its handler last said: percentage and message."""
        return await (await self._engine()).read_progress(self.id)

    def _value(self, ended: Ended) -> R:
        if ended.outcome is not TerminalOutcome.SUCCESS:
            raise _ENDS.get(ended.outcome, RunFailed)(self.id, self.task, ended.reason)
        plain = from_json(ended.result) if ended.result else None
        value: R = self._shape.load(plain, "result")
        return value

    def __repr__(self) -> str:
        return f"<Run {self.task} {self.id}>"


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
