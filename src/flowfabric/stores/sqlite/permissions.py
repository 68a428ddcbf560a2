"""Permissions of the database file and its side files.

A new file belongs to its user alone (0600), whatever the umask. An operator may share it by changing its mode; the
files and the folder beside it (lock, wake-up sockets) then follow: they are open to those who may write the database,
and to nobody else. A user who may only read it, or who may write the folder, cannot hold the lock. SQLite treats its
own side files (`-wal`, `-shm`) alike: it gives them the mode of the database.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from flowfabric.errors import StoreFault
from flowfabric.stores.sqlite.errors import unavailable

_OWNER = 0o600
_GROUP = 0o060
_OTHERS = 0o006


def create_database(path: Path) -> None:
    """Create an empty file that only this user may read and write; one that exists is left as it is."""
    target = os.path.realpath(path)  # a link may lead to a file that is still to be created
    with contextlib.suppress(FileExistsError, FileNotFoundError):  # the driver reports a missing folder
        try:
            os.mknod(target, _OWNER | stat.S_IFREG)  # opens no file: closing one drops all locks that SQLite has on it
        except (NotImplementedError, PermissionError, AttributeError):  # macOS leaves this call to root
            os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _OWNER))


def open_side_file(database: Path, path: Path) -> int:
    """Open a file beside the database, created if need be; refuse one of a user who may not write the database."""
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        try:
            opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _OWNER)
        except FileExistsError:  # another process has just created it
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.fstat(opened)
        if not _share(database, opened, found, side_file_mode(database)):
            raise unavailable(
                f"{path} belongs to user {found.st_uid}, who may not write {database.name} but could stop everybody "
                "from writing: remove it",
                StoreFault.AUTH,
            )
    except BaseException:
        os.close(opened)
        raise
    return opened


def open_side_folder(database: Path, path: Path) -> bool:
    """Create a folder beside the database if need be; False when its owner may not write the database."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    mode = side_file_mode(database)
    return stat.S_ISDIR(found.st_mode) and _share(database, path, found, mode | (mode & 0o444) >> 2)


def _share(database: Path, file: int | Path, found: os.stat_result, mode: int) -> bool:
    """Give a side file this mode and, as root, the owner of the database; False if its owner is not trusted."""
    root = database.stat()
    if not _is_trusted(found, root):
        return False
    if os.geteuid() in (0, found.st_uid):
        # Root leaves nothing behind that the owner could not use; a member of the group gives it to the group.
        if (root.st_uid, root.st_gid) != (found.st_uid, found.st_gid):
            with contextlib.suppress(PermissionError):
                os.chown(file, root.st_uid if os.geteuid() == 0 else -1, root.st_gid)
        if stat.S_IMODE(found.st_mode) & 0o777 != mode:
            os.chmod(file, mode)  # noqa: PTH101 - it may be an open file
    return True


def is_trusted(database: Path, path: Path) -> bool:
    """True if a side file belongs to a user who may write the database."""
    return _is_trusted(path.lstat(), database.stat())


def _is_trusted(found: os.stat_result, database: os.stat_result) -> bool:
    if found.st_uid in (0, os.geteuid(), database.st_uid):
        return True
    by_group = database.st_mode & _GROUP == _GROUP and found.st_gid == database.st_gid
    return by_group or database.st_mode & _OTHERS == _OTHERS


def side_file_mode(database: Path) -> int:
    """Return the mode of a side file: accessible to those who may read and write the database."""
    mode = database.stat().st_mode
    return _OWNER | sum(bits for bits in (_GROUP, _OTHERS) if mode & bits == bits)
