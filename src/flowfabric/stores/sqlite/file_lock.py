"""The file and its neighbours: where it may lie, whether it is still there, and whose turn it is to write."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import weakref
from pathlib import Path

from flowfabric.errors import InvalidInput, StoreFault
from flowfabric.stores.sqlite.errors import unavailable
from flowfabric.stores.sqlite.permissions import open_side_file

# File systems whose locks or shared memory do not reach other machines, so that two of them would spoil the file.
_NETWORK = re.compile(
    r"afs|ceph|cifs|lustre|ncpfs|nfs4?|smb\w*|fuse\.(ceph|davfs2|glusterfs|rclone|s3fs|sshfs)"
).fullmatch
_MOUNTS = Path("/proc/mounts")
_LOCKS = Path("/proc/locks")


def refuse_network_filesystem(path: Path, mounts: Path = _MOUNTS) -> None:
    """Raise when the file lies on a network file system; where the system does not tell, believe the best."""
    if not mounts.exists():
        return
    folder = path.resolve().parent
    best, kind = Path("/"), ""
    for line in mounts.read_text(errors="replace").splitlines():
        point, fstype = line.split()[1:3]
        where = Path(point.encode().decode("unicode_escape"))
        if folder.is_relative_to(where) and len(where.parts) >= len(best.parts):
            best, kind = where, fstype
    if _NETWORK(kind):
        raise InvalidInput(f"{path} lies on a network file system ({kind}); SQLite needs a local one")


class FileIdentity:
    """The file at its path, as it was when it was opened.

    One that was removed, or had another one put in its place, would go on taking what nobody else ever sees; what is
    remembered of it (which number stands for which line) may be wrong of the other one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: tuple[int, int] | None = None

    def pin(self) -> None:
        """Know what is there now as the file that was opened."""
        self._opened = self._now()

    def is_same(self) -> bool:
        """Whether it is still there; everything will do before one was opened."""
        return self._opened is None or self._now() == self._opened

    def check_same(self) -> None:
        """Raise unless it is."""
        if not self.is_same():
            raise unavailable(f"{self._path} was removed or replaced after it was opened; open the store anew")

    def _now(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)  # noqa: PTH116 - a third of the time, and this runs for each piece of work
        except OSError:
            return None
        return found.st_dev, found.st_ino


class WriterLock:
    """Writers queue here before they ask SQLite: the kernel keeps a fair line, SQLite's own waiting does not."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._path = Path(f"{database}-lock")
        self._file: int | None = None
        _TURNS.add(self)

    def __enter__(self) -> None:
        if self._file is None:
            self._file = open_side_file(self._database, self._path)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def timeout_error(self, seconds: float) -> Exception:
        """The error for a write that has waited so long for the lock and is given up."""
        holder = _lock_holder(self._path)
        return unavailable(
            f"{self._path} was not free for {seconds:g} s: {holder or 'another process'} holds it; nothing was written",
            StoreFault.TIMEOUT,
        )

    def close(self) -> None:
        """Let go of the lock file; it stays, for others may be waiting at it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _lock_holder(path: Path, locks: Path = _LOCKS) -> str:
    """The process that holds the lock on a file, where the system tells."""
    with contextlib.suppress(OSError, ValueError):
        inode = path.stat().st_ino
        for line in locks.read_text().splitlines():
            _, kind, _, _, pid, place, *_ = line.split()
            if kind == "FLOCK" and int(place.rpartition(":")[2]) == inode and int(pid) > 0:
                return "this process" if int(pid) == os.getpid() else f"process {pid}"
    return ""


_TURNS: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _let_go() -> None:
    """A forked child shares its parent's place in the line; it must not keep it when the parent is gone."""
    for turn in _TURNS:
        turn.close()


os.register_at_fork(after_in_child=_let_go)
