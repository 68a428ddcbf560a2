"""A status line: the last line of a terminal, redrawn while output scrolls above it."""

from __future__ import annotations

import io
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

CLEAR = "\r\x1b[K"


class StatusLine:
    """Draws one line on a terminal. Thread-safe, because handlers print from their own threads."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._text = ""
        self._drawn = False
        self._is_mid_line = False  # True if output has not ended its line; a status line there would be part of it
        self._lock = threading.RLock()

    def show(self, text: str) -> None:
        """Replace the status line."""
        with self._lock:
            if text != self._text or not self._drawn:
                self._text = text
                self._erase()
                self._draw()

    def write_above(self, stream: TextIO, text: str) -> int:
        """Write to a stream of the same terminal, above the status line."""
        with self._lock:
            self._erase()
            stream.write(text)
            stream.flush()
            if text:
                self._is_mid_line = not text.endswith("\n")
            self._draw()
        return len(text)

    def close(self) -> None:
        """Erase the status line."""
        with self._lock:
            self._erase()
            self._text = ""

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write(CLEAR)
            self._stream.flush()
            self._drawn = False

    def _draw(self) -> None:
        if self._text and not self._is_mid_line:
            self._stream.write(self._text[: shutil.get_terminal_size().columns - 1])
            self._stream.flush()
            self._drawn = True


class _StreamAboveStatus(io.TextIOBase):
    """Replaces a stream of the process while a status line is shown."""

    def __init__(self, stream: TextIO, status: StatusLine) -> None:
        self._stream = stream
        self._status = status

    def write(self, text: str) -> int:
        return self._status.write_above(self._stream, text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding


@contextmanager
def status_line() -> Iterator[StatusLine | None]:
    """Show a status line on stderr; yield None if stderr is no terminal."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    out, err = sys.stdout, sys.stderr
    status = StatusLine(err)
    sys.stderr = _StreamAboveStatus(err, status)
    if out.isatty():
        sys.stdout = _StreamAboveStatus(out, status)
    try:
        yield status
    finally:
        status.close()
        sys.stdout, sys.stderr = out, err
