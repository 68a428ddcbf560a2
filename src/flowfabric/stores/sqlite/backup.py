"""Online backup: a consistent and verified copy of a file that is in use.

SQLite's backup API reads all pages in one transaction, so it copies one snapshot while other processes keep writing. A
plain `cp` reads pages of different states and omits the WAL: such a copy may be corrupt. A process that has the old
file open after a restore is refused by `file_identity`.
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
    """Copy a database to a new file, readable by this user alone; return its size in bytes.

    The copy gets its name after it has passed SQLite's integrity check and was synced. An existing target is refused; a
    failed copy leaves nothing behind.
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
    except FileExistsError as error:
        raise InvalidInput(f"{target} exists already; name a new file") from error
    except apsw.Error as error:
        raise translate_error(error) from error
    finally:
        for suffix in ("", "-journal", "-wal", "-shm"):
            Path(f"{partial}{suffix}").unlink(missing_ok=True)
    _sync(target.parent)
    return target.stat().st_size


def _copy(source: Path, partial: Path) -> None:
    create_database(partial)
    original = apsw.Connection(str(source), flags=apsw.SQLITE_OPEN_READWRITE)
    copy = apsw.Connection(str(partial))
    try:
        original.set_busy_timeout(BUSY_TIMEOUT_MS)
        with copy.backup("main", original, "main") as backup:
            backup.step(-1)
        check = copy.pragma("integrity_check")
        if check != "ok":
            raise unavailable(f"the copy of {source} is damaged, so {source} may be, too: {check}", StoreFault.OTHER)
        copy.pragma("journal_mode", "wal")
        copy.pragma("wal_checkpoint(TRUNCATE)")
    finally:
        copy.close()
        original.close()
    _sync(partial)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
