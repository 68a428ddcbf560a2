"""While a transaction is open, threads that compute let the writer's thread have the interpreter soon.

A statement runs without the interpreter lock and asks for it again at its end; a thread that computes gives it up only
after the switch interval, 5 ms unless somebody chose otherwise. A batch is seven statements of half a millisecond: the
writer would wait longer than it writes, with the file's only write lock in its hands and other processes behind it.
"""

from __future__ import annotations

import os
import sys
import threading

SWITCH_S = 0.0002
_ROUND_S = 0.0000005  # the interpreter cuts off what is no whole microsecond, also of an interval that it has told


class Hurry:
    """Shortens the interpreter's switch interval from the first transaction that begins to the last that ends."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was open: the threads of a parent are not those of its child."""
        self._lock = threading.Lock()
        self._open = 0
        self._usual = self._short = 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual, SWITCH_S) + _ROUND_S)
                self._short = sys.getswitchinterval()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._back()

    def after_fork(self) -> None:
        """The child of a process in which a transaction was open."""
        if self._open:
            self._back()
        self.begin_anew()

    def _back(self) -> None:
        if sys.getswitchinterval() == self._short:  # or else somebody has chosen another one meanwhile
            sys.setswitchinterval(self._usual + _ROUND_S)


HURRY = Hurry()  # of the interpreter, which has one interval for all its threads

os.register_at_fork(after_in_child=HURRY.after_fork)
