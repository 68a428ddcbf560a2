"""Inline reads: a few rows by key are read on the caller's thread, which is faster than a switch to another thread.

In WAL mode readers never wait for the writer. If a read is not possible at once (the connection is in use, the file is
busy or fails), it is left to the connection thread, which waits and translates errors.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TypeVar

import apsw

from flowfabric.stores.sqlite.file_identity import FileIdentity

T = TypeVar("T")


class InlineReader:
    """One connection that is used by the thread that holds its lock."""

    def __init__(self, connect: Callable[[], apsw.Connection], identity: FileIdentity) -> None:
        self._connect = connect
        self._identity = identity
        self._lock = threading.Lock()
        self._db: apsw.Connection | None = None
        self._pid = 0  # the process that owns the connection
        self._closed = False

    def __call__(self, read: Callable[[apsw.Connection], T]) -> T | None:
        """Run a read; return None if the connection thread has to do it."""
        if self._pid != os.getpid() or not self._lock.acquire(blocking=False):
            return None
        try:
            if self._closed or not self._identity.is_same():
                return None
            if self._db is None:
                self._db = self._connect()
                self._db.set_busy_timeout(0)
            return read(self._db)
        except apsw.Error:
            self._drop()
            return None
        finally:
            self._lock.release()

    def bind_to_process(self) -> None:
        """Make this process the owner of the connection."""
        self._pid = os.getpid()

    def close(self) -> None:
        """Refuse further reads, and wait for the current one."""
        if self._pid != os.getpid():  # after a fork, the connection is the parent's, and the lock may never be released
            return
        with self._lock:
            self._closed = True
            self._drop()

    def _drop(self) -> None:
        if self._db is not None:
            db, self._db = self._db, None
            with contextlib.suppress(apsw.Error):
                db.close()
