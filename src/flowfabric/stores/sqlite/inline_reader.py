"""A look that is shorter than the way to another thread: few rows by key are read where they are asked for.

Readers of a log never wait for its writer. What cannot be had at once (the connection is in use, the file is busy or
in trouble) is left to the desk, which waits for it and knows what its errors mean.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TypeVar

import apsw

from flowfabric.stores.sqlite.file_lock import FileIdentity

T = TypeVar("T")


class InlineReader:
    """One connection, used by whatever thread has its lock."""

    def __init__(self, connect: Callable[[], apsw.Connection], spot: FileIdentity) -> None:
        self._connect = connect
        self._spot = spot
        self._lock = threading.Lock()
        self._db: apsw.Connection | None = None
        self._pid = 0  # of the process that this belongs to
        self._closed = False

    def __call__(self, look: Callable[[apsw.Connection], T]) -> T | None:
        """What there is to see, or None when the desk has to be asked."""
        if self._pid != os.getpid() or not self._lock.acquire(blocking=False):
            return None
        try:
            if self._closed or not self._spot.is_same():
                return None
            if self._db is None:
                self._db = self._connect()
                self._db.set_busy_timeout(0)
            return look(self._db)
        except apsw.Error:
            self._drop()
            return None
        finally:
            self._lock.release()

    def bind_to_process(self) -> None:
        """Belong to this process from now on."""
        self._pid = os.getpid()

    def close(self) -> None:
        """Look no more; a look that is under way is waited for."""
        if self._pid != os.getpid():  # a fork: the connection is not ours, and nobody may be left to open the lock
            return
        with self._lock:
            self._closed = True
            self._drop()

    def _drop(self) -> None:
        if self._db is not None:
            db, self._db = self._db, None
            with contextlib.suppress(apsw.Error):  # it was beyond help before
                db.close()
