"""Notifications between processes: a datagram to each process that has the same file open.

Each listener binds a socket in a folder beside the file; a notifier sends to all of them. Nothing blocks: a
notification that does not fit into a buffer is lost, and the next sender removes the socket of a dead process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex

from flowfabric.stores.sqlite.permissions import is_trusted, open_side_folder, side_file_mode

_LONGEST = 100  # bytes of a socket's path; some systems end at 104
_MOST = 60_000  # bytes of a notification; a longer one is sent without topics
_SEPARATOR = "\n"
_TICK_NS = 2_000_000_000  # file systems are at least this exact about times

Callback = Callable[[frozenset[str]], None]


class SQLiteNotifier:
    """Sends and receives the notifications of one store."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._folder = Path(f"{database}-wake")
        self._name = ""
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners: list[tuple[asyncio.AbstractEventLoop, Callback]] = []
        self._known: list[str] = []
        self._read_at = 0  # the time of the folder's last change that `_known` knows of

    def listen(self, callback: Callback) -> bool:
        """Call back for each notification of another process; return False if no socket can be bound here."""
        loop = asyncio.get_running_loop()
        if self._socket is None and not self._bind(loop):
            return False
        self._listeners.append((loop, callback))
        return True

    def notify(self, topics: frozenset[str]) -> None:
        """Notify the other processes."""
        with contextlib.suppress(OSError):
            if others := self._others():
                hint = _SEPARATOR.join(topics).encode()
                self._send(hint if len(hint) <= _MOST else b"", others)

    def close(self) -> None:
        """Stop listening."""
        self._listeners.clear()
        if self._socket is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None
            (self._folder / self._name).unlink(missing_ok=True)

    def _others(self) -> list[str]:
        """Return the sockets of other listeners; the folder is read again only if it has changed."""
        changed = self._folder.stat().st_mtime_ns
        if changed != self._read_at:
            trusted = is_trusted(self._database, self._folder)  # otherwise any user could listen
            with os.scandir(self._folder) as entries:
                self._known = [entry.name for entry in entries if trusted and entry.name != self._name]
            # A second change within the resolution of the file system's clock would not change the time.
            self._read_at = changed if time.time_ns() - changed > _TICK_NS else 0
        return self._known

    def _bind(self, loop: asyncio.AbstractEventLoop) -> bool:
        bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        bell.setblocking(False)
        self._name = f"{os.getpid()}-{token_hex(4)}"
        try:
            if not open_side_folder(self._database, self._folder):
                bell.close()
                return False
            with _short(self._folder) as folder:
                bell.bind(f"{folder}/{self._name}")
            (self._folder / self._name).chmod(side_file_mode(self._database))
            loop.add_reader(bell, self._hear)
        except (OSError, NotImplementedError):
            bell.close()
            return False
        self._socket, self._loop = bell, loop
        return True

    def _hear(self) -> None:
        topics: set[str] = set()
        heard = False
        with contextlib.suppress(OSError):
            while self._socket is not None:
                topics.update(self._socket.recv(_MOST).decode(errors="replace").split(_SEPARATOR))
                heard = True
        if heard:
            topics.discard("")
            for loop, callback in self._listeners:
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    loop.call_soon_threadsafe(callback, frozenset(topics))

    def _send(self, hint: bytes, others: list[str]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, _short(self._folder) as folder:
            sender.setblocking(False)
            for name in others:
                try:
                    sender.sendto(hint, f"{folder}/{name}")
                except ConnectionRefusedError:
                    (self._folder / name).unlink(missing_ok=True)
                except OSError:  # its buffer is full, or it has just ended
                    continue


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """Yield a short path of the folder: the kernel limits the length of socket paths."""
    if len(os.fsencode(folder)) <= _LONGEST - 32:
        yield str(folder)
        return
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{opened}"
    finally:
        os.close(opened)
