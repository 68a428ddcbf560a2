"""A copy of a file that is in use: whole, of one moment, and checked.

SQLite's own backup reads all pages in one transaction, so it copies one moment of the file while others go on writing.
A plain `cp` reads pages of different moments and leaves out the log beside the file: such a copy may be spoilt.
"""

from __future__ import annotations

import os
from pathlib import Path

import apsw

from flowfabric.errors import InvalidInput, StoreFault
from flowfabric.stores.sqlite.errors import translate_error, unavailable
from flowfabric.stores.sqlite.permissions import create_database

BUSY_TIMEOUT_MS = 10_000


def create_backup(source: Path, target: Path) -> int:
    """Copy a file to a new one, readable by this user alone; its size in bytes.

    The copy gets its name once it has passed SQLite's integrity check and is on the disk. A target that exists is
    refused; a copy that failed leaves nothing behind.
    """
    if not source.exists():
        raise InvalidInput(f"there is no file {source}")
    if target.exists() or target.is_symlink():
        raise InvalidInput(f"{target} exists already; name a new file")
    if not target.parent.is_dir():
        raise InvalidInput(f"there is no folder {target.parent}")
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    try:
        _copy(source, partial)
        os.link(partial, target)  # unlike a rename, this replaces nothing
    except FileExistsError as there:
        raise InvalidInput(f"{target} exists already; name a new file") from there
    except apsw.Error as fault:
        raise translate_error(fault) from fault
    finally:
        for end in ("", "-journal", "-wal", "-shm"):
            Path(f"{partial}{end}").unlink(missing_ok=True)
    _sync(target.parent)
    return target.stat().st_size


def _copy(source: Path, partial: Path) -> None:
    create_database(partial)
    kept = apsw.Connection(str(source), flags=apsw.SQLITE_OPEN_READWRITE)
    made = apsw.Connection(str(partial))
    try:
        kept.set_busy_timeout(BUSY_TIMEOUT_MS)
        with made.backup("main", kept, "main") as backup:
            backup.step(-1)
        found = made.pragma("integrity_check")
        if found != "ok":
            raise unavailable(f"the copy of {source} is spoilt, so {source} may be: {found}", StoreFault.OTHER)
        made.pragma("journal_mode", "wal")
        made.pragma("wal_checkpoint(TRUNCATE)")
    finally:
        made.close()
        kept.close()
    _sync(partial)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
