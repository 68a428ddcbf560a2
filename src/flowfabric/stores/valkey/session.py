"""One TCP connection to a server: commands out, replies in, in the same order.

All commands of one turn of the event loop leave in one write. A deque of commands is all the bookkeeping there is. The
connection is closed if the oldest command waits longer than `command_s`, so a node that swallows everything is noticed.

With `confirmations` (WAIT, WAITAOF) each write is followed by these commands. The replies of the batch are held until
the server has confirmed it. A batch that is confirmed by fewer copies than asked has an unknown outcome: it was
executed here, and may vanish in a failover.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias, cast

from libvalkey import ProtocolError, Reader, pack_command

from flowfabric.errors import StoreFault, StoreUnavailable
from flowfabric.settings import Deadlines
from flowfabric.stores.valkey.errors import ReplyError, translate_reply, unavailable

Reply: TypeAlias = Any  # bytes, int, None, or a list of these
Argument: TypeAlias = "str | bytes | int | float"

MAX_WRITE_BYTES = 1 << 20  # of one write to the socket; further commands wait, and can still be sent elsewhere
SLOW_S = 1.0  # time without a reply, after which the owner is notified that a node is slow
ASKING = pack_command(("ASKING",))

_NOT_ENOUGH = object()


class Command:
    """One command of a caller, encoded, with the future of its reply."""

    __slots__ = ("asking", "began_at", "future", "is_read", "loads", "packed", "redirects", "sent_at", "slot")

    def __init__(
        self, packed: bytes, future: asyncio.Future[Reply], began_at: float, *, slot: int | None, is_read: bool
    ) -> None:
        self.packed = packed
        self.future = future
        self.began_at = began_at
        self.sent_at = began_at
        self.slot = slot  # None: for this node, whatever slots it serves
        self.is_read = is_read  # it may be repeated after a lost reply
        self.asking = False  # the next node is asked with ASKING, once
        self.redirects = 0  # how often it was sent again, for a redirect or another reason
        self.loads = 0  # loads of the library, because a node did not know the function

    def succeed(self, reply: Reply) -> None:
        """Give the caller its reply, unless the caller has left."""
        if not self.future.done():
            self.future.set_result(reply)

    def fail(self, error: Exception) -> None:
        """Give the caller an error, unless the caller has left."""
        if not self.future.done():
            self.future.set_exception(error)


class Confirmation:
    """A command behind a batch that says how many copies of it exist, and how to read its reply."""

    def __init__(self, *arguments: Argument, is_enough: Callable[[Reply], bool]) -> None:
        self.name = str(arguments[0])
        self.packed = pack_command(arguments)
        self.is_enough = is_enough


class Endpoint:
    """Where to connect, and as whom."""

    __slots__ = ("database", "host", "password", "port", "tls", "username")

    def __init__(
        self,
        host: str,
        port: int,
        *,
        username: str | None = None,
        password: str | None = None,
        database: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.username = username
        self.password = password
        self.database = database
        self.tls = tls

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def greeting(self) -> list[bytes]:
        """Return the first commands of a connection."""
        hello: list[Argument] = ["HELLO", 2]
        if self.password is not None:
            hello += ["AUTH", self.username or "default", self.password]
        commands = [pack_command((*hello, "SETNAME", "flowfabric"))]
        return [*commands, pack_command(("SELECT", self.database))] if self.database else commands


class SessionOwner(Protocol):
    """Supplies a session with commands, and gets those without a proper reply."""

    endpoint: Endpoint
    confirmations: Sequence[Confirmation]

    @property
    def deadlines(self) -> Deadlines:
        """The timeouts of now."""

    def refill(self, session: Session) -> None:
        """Send the waiting commands, as far as the session has capacity."""

    def lose(
        self, session: Session, sent: Sequence[Command], unsent: Sequence[Command], error: StoreUnavailable
    ) -> None:
        """Take the commands of a session that has ended."""

    def report_unconfirmed(self, commands: Sequence[Command], error: StoreUnavailable) -> None:
        """Take executed commands of which there are fewer copies than asked."""

    def report_error_reply(self, command: Command, error: ReplyError) -> None:
        """Take a command with an error reply."""

    def report_slow(self) -> None:
        """Note that a command has waited for its reply for `SLOW_S`."""


class Session(asyncio.Protocol):
    """One TCP connection."""

    def __init__(self, owner: SessionOwner, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._confirmations = owner.confirmations
        self._loop = loop
        self._reader = Reader(protocolError=ProtocolError, replyError=ReplyError, notEnoughData=_NOT_ENOUGH)
        self._transport: asyncio.Transport | None = None
        self._pending: deque[Command | Confirmation | asyncio.Future[Reply]] = deque()
        self._held: list[tuple[Command, Reply]] = []  # replies of a batch that is not confirmed yet
        self._fault: str | None = None  # why the batch is in doubt
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._unflushed: list[Command] = []
        self._paused = False
        self._is_retired = False
        self._timer: asyncio.TimerHandle | None = None
        self.is_over = False

    # --- sending

    @property
    def is_idle(self) -> bool:
        return not self._pending and not self._held

    @property
    def has_room(self) -> bool:
        return not self._paused and not self._is_retired and self._out_bytes < MAX_WRITE_BYTES

    def retire(self) -> None:
        """Accept no further commands, and close once all replies are there."""
        self._is_retired = True
        self._loop.call_soon(self._close_if_retired)

    def _close_if_retired(self) -> None:
        if self._is_retired and self.is_idle:
            self.abort(unavailable(f"{self._owner.endpoint}: renewed", StoreFault.TRANSPORT))

    def time(self) -> float:
        return self._loop.time()

    def greet(self, packed: bytes) -> asyncio.Future[Reply]:
        """Send a command of the greeting at once."""
        future: asyncio.Future[Reply] = self._loop.create_future()
        if self._transport is None or self.is_over:
            raise unavailable("the server closed the connection at once", StoreFault.TRANSPORT)
        self._pending.append(future)
        self._transport.write(packed)
        return future

    def send(self, command: Command) -> None:
        """Queue a command for the write at the end of this turn of the loop."""
        if not self._out:
            self._loop.call_soon(self._flush)
        if command.asking:
            command.asking = False
            self._out.append(ASKING)
            self._pending.append(self._loop.create_future())
        self._out.append(command.packed)
        self._out_bytes += len(command.packed)
        self._unflushed.append(command)
        self._pending.append(command)

    def _flush(self) -> None:
        if self._transport is None or self.is_over:
            return
        for confirmation in self._confirmations:
            self._out.append(confirmation.packed)
            self._pending.append(confirmation)
        out = self._out
        self._out = []
        self._out_bytes = 0
        self._unflushed.clear()
        self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        if self._timer is None:
            self._watch()
        if not self._paused:
            self._owner.refill(self)

    # --- the transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        transport = self._transport
        transport.set_write_buffer_limits(high=MAX_WRITE_BYTES)

    def set_options(self, deadlines: Deadlines) -> None:
        """Set keepalive and the user timeout, so that the kernel notices a dead peer."""
        wrapped = None if self._transport is None else self._transport.get_extra_info("socket")
        if wrapped is not None:
            with socket.socket(fileno=os.dup(wrapped.fileno())) as same:  # uvloop's object has no setsockopt
                for option in [*deadlines.socket_options(), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]:
                    same.setsockopt(*option)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._owner.refill(self)

    def data_received(self, data: bytes) -> None:
        reader, pending = self._reader, self._pending
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not _NOT_ENOUGH:
                command = pending.popleft()
                if type(command) is Command:
                    if reply.__class__ is ReplyError:
                        self._owner.report_error_reply(command, reply)
                    elif self._confirmations:
                        self._held.append((command, reply))
                    elif not command.future.done():
                        command.future.set_result(reply)
                elif isinstance(command, Confirmation):
                    self._confirm(command, reply)
                elif isinstance(command, asyncio.Future) and not command.done():
                    if isinstance(reply, ReplyError):
                        command.set_exception(reply)
                        command.exception()  # nobody awaits the second command of a failed greeting
                    else:
                        command.set_result(reply)
        except (ProtocolError, IndexError) as error:
            detail = f"{self._owner.endpoint}: an unexpected reply: {error}"
            self.abort(unavailable(detail, StoreFault.PROTOCOL, in_doubt=True))
        if self._is_retired:
            self._close_if_retired()

    def connection_lost(self, error: Exception | None) -> None:
        detail = f"{self._owner.endpoint}: {_describe(error) if error else 'the server closed the connection'}"
        self._end(unavailable(detail, StoreFault.TRANSPORT, in_doubt=True))

    # --- the end

    def abort(self, error: StoreUnavailable | None) -> None:
        """Close the TCP connection at once."""
        if self._transport is not None:
            self._transport.abort()
        if error is None:
            self.is_over = True
        else:
            self._end(error)

    def _end(self, error: StoreUnavailable) -> None:
        if self.is_over:
            return
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
        unsent, self._unflushed = self._unflushed, []
        not_sent = set(map(id, unsent))
        sent = [command for command, _ in self._held]
        for command in self._pending:
            if isinstance(command, Command):
                if id(command) not in not_sent:
                    sent.append(command)
            elif isinstance(command, asyncio.Future) and not command.done():
                command.set_exception(error)
                command.exception()  # of ASKING nobody awaits it
        self._pending.clear()
        self._held.clear()
        self._owner.lose(self, sent, unsent, error)

    # --- confirmations and timeouts

    def _confirm(self, confirmation: Confirmation, reply: Reply) -> None:
        """Release the replies of a batch, or report that it may vanish."""
        if isinstance(reply, ReplyError) or not confirmation.is_enough(reply):
            shown = reply if isinstance(reply, ReplyError) else f"{confirmation.name} answered {reply}"
            self._fault = f"{self._owner.endpoint}: the batch has fewer copies than asked: {shown}"
        if confirmation is not self._confirmations[-1]:
            return
        held, fault = self._held, self._fault
        self._held, self._fault = [], None
        if fault is None:
            for command, answer in held:
                command.succeed(answer)
        else:
            error = unavailable(fault, StoreFault.CLUSTER, in_doubt=True)
            self._owner.report_unconfirmed([command for command, _ in held], error)

    def _watch(self) -> None:
        """Check the oldest command: report a slow node, and close a silent connection."""
        self._timer = None
        oldest = next((command for command in self._pending if isinstance(command, Command)), None)
        if self._held:
            oldest = self._held[0][0]
        if oldest is None or self.is_over:
            return
        now = self._loop.time()
        limit_s = self._owner.deadlines.command_s
        waited_s = now - oldest.sent_at
        if limit_s and waited_s >= limit_s:
            detail = f"{self._owner.endpoint}: no reply within {limit_s:g} s"
            self.abort(unavailable(detail, StoreFault.TIMEOUT, in_doubt=True))
            return
        if waited_s >= SLOW_S:
            self._owner.report_slow()
        pause_s = SLOW_S - waited_s if waited_s < SLOW_S else SLOW_S
        if limit_s:
            pause_s = min(pause_s, limit_s - waited_s)
        self._timer = self._loop.call_later(pause_s, self._watch)


async def open_session(endpoint: Endpoint, deadlines: Deadlines, owner: SessionOwner) -> Session:
    """Connect and authenticate within `connect_s`; any failure is `StoreUnavailable`, not in doubt."""
    loop = asyncio.get_running_loop()
    session = Session(owner, loop)
    try:
        async with asyncio.timeout(deadlines.connect_s or None):
            await loop.create_connection(lambda: session, endpoint.host, endpoint.port, ssl=endpoint.tls)
            session.set_options(deadlines)
            replies = [session.greet(packed) for packed in endpoint.greeting()]
            for reply in replies:
                await reply
            if session.is_over:
                raise unavailable("the server closed the connection at once", StoreFault.TRANSPORT)
    except ReplyError as error:
        session.abort(None)
        translated = translate_reply(error)
        if isinstance(translated, StoreUnavailable):
            raise translated from error
        raise unavailable(f"{endpoint}: {error}", StoreFault.PROTOCOL) from error
    except TimeoutError as error:
        session.abort(None)
        detail = f"{endpoint}: no connection within {deadlines.connect_s:g} s"
        raise unavailable(detail, StoreFault.TIMEOUT) from error
    except Exception as error:
        session.abort(None)
        raise unavailable(f"{endpoint}: {_describe(error)}", StoreFault.TRANSPORT) from error
    except BaseException:
        session.abort(None)
        raise
    return session


def _describe(error: BaseException) -> str:
    if isinstance(error, StoreUnavailable):
        return error.detail
    if isinstance(error, socket.gaierror):
        return f"the name of the host could not be resolved: {(error.strerror or '').lower()}"
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ssl.SSLError):
        with suppress(ValueError):
            return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__
