"""The connection to one server: pipelines the commands of all callers, and reconnects.

A command is encoded and queued by the call itself, without an await, so the order of calls is the order on the wire.

The write buffer of a connection and the commands that wait for it are bounded in bytes; a connection attempt takes at
most `connect_s`, and a reply at most `command_s`. The commands of a connection that ends are handed to the owner, which
decides: one that was not sent may be sent elsewhere, one that was sent has an unknown outcome.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from flowfabric.errors import StoreFault, StoreUnavailable
from flowfabric.event_loop import start_task
from flowfabric.settings import Deadlines
from flowfabric.stores.valkey.errors import ReplyError, unavailable
from flowfabric.stores.valkey.session import SLOW_S, Command, Confirmation, Endpoint, Session, open_session

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 0.5  # pause between attempts to connect
MAX_WAITING_BYTES = 64 << 20  # size of the commands that wait for a connection; one command of any size is accepted

_RANDOM = random.SystemRandom()  # does not disturb the application's seeded generator


class ConnectionOwner(Protocol):
    """Decides what happens to commands that got no proper reply."""

    @property
    def deadlines(self) -> Deadlines:
        """The timeouts of now."""

    def handle_error_reply(self, command: Command, error: ReplyError) -> None:
        """Send a refused command again, or fail it."""

    def handle_lost(self, commands: Sequence[Command], error: StoreUnavailable, *, sent: bool) -> None:
        """Send commands without a reply again, or fail them; `sent`: the server may have received them."""

    def handle_slow(self) -> None:
        """Note that a command has waited for its reply for `SLOW_S`."""


class Connection:
    """Sends commands to one endpoint, over one TCP connection at a time."""

    def __init__(
        self,
        endpoint: Endpoint,
        owner: ConnectionOwner,
        confirmations: Sequence[Confirmation] = (),
    ) -> None:
        self.endpoint = endpoint
        self.confirmations = confirmations
        self._owner = owner
        self._session: Session | None = None
        self._waiting: deque[Command] = deque()
        self._waiting_bytes = 0
        self._connecting: asyncio.Task[None] | None = None
        self._slow_timer: asyncio.TimerHandle
        self._backoff_s = 0.0
        self._not_before = 0.0
        self._closed = False

    @property
    def deadlines(self) -> Deadlines:
        return self._owner.deadlines

    @property
    def is_idle(self) -> bool:
        """True if no command waits here, for the connection or for a reply."""
        return not self._waiting and (self._session is None or self._session.is_idle)

    def send(self, command: Command) -> None:
        """Send a command behind those that were sent before; it waits if there is no connection yet."""
        session = self._session
        if session is not None and not self._waiting and session.has_room:
            session.send(command)
            return
        size = len(command.packed)
        if self._closed:
            command.fail(unavailable("the store is closed", StoreFault.OTHER))
        elif self._waiting and self._waiting_bytes + size > MAX_WAITING_BYTES:
            detail = f"{self.endpoint}: {self._waiting_bytes} bytes of commands wait for the connection already"
            command.fail(unavailable(detail, StoreFault.TRANSPORT))
        else:
            self._waiting.append(command)
            self._waiting_bytes += size
            if session is None and self._connecting is None:
                self._connecting = start_task(self._connect(), name="flowfabric-valkey")

    def drop(self, reason: str) -> None:
        """Close the TCP connection; sent commands have an unknown outcome then."""
        if self._session is not None:
            self._session.abort(unavailable(f"{self.endpoint}: {reason}", StoreFault.TRANSPORT, in_doubt=True))

    def renew(self) -> None:
        """Use a new TCP connection, to whatever the host's name means now, once the present one has all its replies."""
        if self._session is not None:
            self._session.retire()

    def take_waiting(self) -> list[Command]:
        """Return the commands that were not sent, which are the caller's now."""
        waiting = list(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        return waiting

    async def close(self) -> None:
        """Close; commands without a reply end with `StoreUnavailable`."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            with suppress(asyncio.CancelledError):
                await self._connecting
        for command in self.take_waiting():
            command.fail(unavailable("the store is closed", StoreFault.OTHER))
        if self._session is not None:
            self._session.abort(unavailable("the store is closed", StoreFault.OTHER, in_doubt=True))

    def lose(
        self, session: Session, sent: Sequence[Command], unsent: Sequence[Command], error: StoreUnavailable
    ) -> None:
        """Return the commands of a TCP connection that has ended to the owner."""
        if self._session is session:
            self._session = None
            self._waiting.extendleft(reversed(unsent))  # they go first on the next connection
            self._waiting_bytes += sum(len(command.packed) for command in unsent)
            self._give_up_late()
            if self._waiting and not self._closed and self._connecting is None:
                self._connecting = start_task(self._connect(), name="flowfabric-valkey")
        self._owner.handle_lost(sent, error, sent=True)

    def _give_up_late(self) -> None:
        """Return commands to the owner that have waited for longer than a reply may take."""
        limit_s = self.deadlines.command_s
        now = asyncio.get_running_loop().time()
        late = [command for command in self._waiting if limit_s and now - command.began_at >= limit_s]
        if late:
            gone = set(map(id, late))
            self._waiting = deque(command for command in self._waiting if id(command) not in gone)
            self._waiting_bytes = sum(len(command.packed) for command in self._waiting)
            detail = f"{self.endpoint}: not sent within {limit_s:g} s"
            self._owner.handle_lost(late, unavailable(detail, StoreFault.TIMEOUT), sent=False)

    def refill(self, session: Session) -> None:
        """Send the waiting commands, as far as the session has capacity."""
        while self._waiting and session.has_room:
            command = self._waiting.popleft()
            self._waiting_bytes -= len(command.packed)
            if not command.future.done():
                command.sent_at = session.time()
                session.send(command)

    def report_unconfirmed(self, commands: Sequence[Command], error: StoreUnavailable) -> None:
        self._owner.handle_lost(commands, error, sent=True)

    def report_error_reply(self, command: Command, error: ReplyError) -> None:
        self._owner.handle_error_reply(command, error)

    def report_slow(self) -> None:
        self._owner.handle_slow()

    async def _connect(self) -> None:
        """Connect once; if that fails, return everything that waits to the owner."""
        loop = asyncio.get_running_loop()
        self._slow_timer = loop.call_later(SLOW_S, self._report_slow_attempt)
        try:
            if (pause := self._not_before - loop.time()) > 0:
                await asyncio.sleep(pause)
            session = await open_session(self.endpoint, self.deadlines, self)
        except StoreUnavailable as error:
            self._connecting = None
            self._backoff_s = min(max(self._backoff_s * 2, MIN_BACKOFF_S), MAX_BACKOFF_S)
            self._not_before = loop.time() + self._backoff_s * _RANDOM.uniform(0.5, 1.0)
            self._owner.handle_lost(self.take_waiting(), error, sent=False)
            return
        finally:
            self._slow_timer.cancel()
        self._connecting = None
        self._backoff_s = 0.0
        self._session = session
        self.refill(session)

    def _report_slow_attempt(self) -> None:
        """Report an attempt to connect that takes long, again and again until it ends."""
        self._slow_timer = asyncio.get_running_loop().call_later(SLOW_S, self._report_slow_attempt)
        self._owner.handle_slow()
