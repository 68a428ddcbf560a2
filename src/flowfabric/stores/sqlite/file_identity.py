"""FileIdentity: detects that the database file was removed or replaced while this process has it open."""

from __future__ import annotations

import os
from pathlib import Path

from flowfabric.stores.sqlite.errors import unavailable


class FileIdentity:
    """The identity of the file that was opened.

    Writes to a file that was removed or replaced would be lost, and cached data such as queue ids may be wrong for the
    new file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: tuple[int, int] | None = None

    def pin(self) -> None:
        """Record the file at the path as the opened one."""
        self._opened = self._now()

    def is_same(self) -> bool:
        """True if the path still leads to the opened file, or if none was recorded."""
        return self._opened is None or self._now() == self._opened

    def check_same(self) -> None:
        """Raise `StoreUnavailable` if the file was removed or replaced."""
        if not self.is_same():
            raise unavailable(f"{self._path} was removed or replaced after it was opened; open the store again")

    def _now(self) -> tuple[int, int] | None:
        try:
            stat = os.stat(self._path)  # noqa: PTH116 - three times as fast, and this runs for each job
        except OSError:
            return None
        return stat.st_dev, stat.st_ino
