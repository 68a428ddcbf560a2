"""The database file: refuses network file systems, and serializes writers by a lock file."""

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

# File systems whose locks or shared memory do not work across machines: two of them would corrupt the file.
_NETWORK = re.compile(
    r"afs|ceph|cifs|lustre|ncpfs|nfs4?|smb\w*|fuse\.(ceph|davfs2|glusterfs|rclone|s3fs|sshfs)"
).fullmatch
_MOUNTS = Path("/proc/mounts")
_LOCKS = Path("/proc/locks")


def refuse_network_filesystem(path: Path, mounts: Path = _MOUNTS) -> None:
    """Raise `InvalidInput` if the file is on a network file system; do nothing if the system does not list mounts."""
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


class WriterLock:
    """A lock file that writers acquire before SQLite's lock: the kernel's queue is fair, SQLite's busy wait is not."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._path = Path(f"{database}-lock")
        self._file: int | None = None
        _LOCK_FILES.add(self)

    def __enter__(self) -> None:
        if self._file is None:
            self._file = open_side_file(self._database, self._path)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def timeout_error(self, seconds: float) -> Exception:
        """Return the error of a write that has waited too long for the lock."""
        holder = _lock_holder(self._path)
        return unavailable(
            f"{self._path} was not free for {seconds:g} s: {holder or 'another process'} holds it; nothing was written",
            StoreFault.TIMEOUT,
        )

    def close(self) -> None:
        """Close the lock file. It is not removed, because other processes may wait for it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _lock_holder(path: Path, locks: Path = _LOCKS) -> str:
    """Return the process that holds the lock on a file; an empty text if the system does not list locks."""
    with contextlib.suppress(OSError, ValueError):
        inode = path.stat().st_ino
        for line in locks.read_text().splitlines():
            _, kind, _, _, pid, place, *_ = line.split()
            if kind == "FLOCK" and int(place.rpartition(":")[2]) == inode and int(pid) > 0:
                return "this process" if int(pid) == os.getpid() else f"process {pid}"
    return ""


_LOCK_FILES: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the lock files in a forked child: it would share the parent's lock and keep it after the parent's end."""
    for lock in _LOCK_FILES:
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)
