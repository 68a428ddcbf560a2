"""What the driver's errors mean to a caller of the port."""

from __future__ import annotations

import apsw

from flowfabric.errors import StoreFault, StoreUnavailable
from flowfabric.handles import BackendTag
from flowfabric.stores.port import Collision, Unstorable

BACKEND = BackendTag.SQLITE.title

# The file cannot be read or written now: nothing was written, and it may pass.
_PASSING: dict[type[apsw.Error], StoreFault] = {
    apsw.BusyError: StoreFault.TIMEOUT,
    apsw.LockedError: StoreFault.TIMEOUT,
    apsw.InterruptError: StoreFault.TIMEOUT,
    apsw.FullError: StoreFault.TRANSPORT,
    apsw.IOError: StoreFault.TRANSPORT,
    apsw.ReadOnlyError: StoreFault.TRANSPORT,
    apsw.CantOpenError: StoreFault.TRANSPORT,
    apsw.ProtocolError: StoreFault.TRANSPORT,
    apsw.NoMemError: StoreFault.TRANSPORT,
    apsw.PermissionsError: StoreFault.AUTH,
    apsw.AuthError: StoreFault.AUTH,
    apsw.CorruptError: StoreFault.OTHER,
    apsw.NotADBError: StoreFault.OTHER,
}

_TAKEN = (apsw.SQLITE_CONSTRAINT_UNIQUE, apsw.SQLITE_CONSTRAINT_PRIMARYKEY, apsw.SQLITE_CONSTRAINT_ROWID)
_UNSTORABLE = (apsw.ConstraintError, apsw.MismatchError, apsw.TooBigError, apsw.RangeError)


def unavailable(detail: str, source: StoreFault = StoreFault.OTHER) -> StoreUnavailable:
    """The file did not serve; nothing was written."""
    return StoreUnavailable(detail, backend=BACKEND, source=source, in_doubt=False)


def translate_error(error: Exception) -> Exception:
    """The error as the port knows it, with its cause; one that only a bug explains stays what it is."""
    known: Exception | None = None
    if isinstance(error, apsw.ConstraintError) and getattr(error, "extendedresult", None) in _TAKEN:
        known = Collision(str(error))
    elif isinstance(error, (*_UNSTORABLE, OverflowError, UnicodeEncodeError)):  # the last two before it was sent
        known = Unstorable(str(error))
    elif isinstance(error, OSError):  # of the lock file
        known = unavailable(str(error), StoreFault.TRANSPORT)
    else:
        source = next((source for kind, source in _PASSING.items() if isinstance(error, kind)), None)
        if source is not None:
            known = unavailable(str(error), source)
    if known is None:
        return error
    known.__cause__ = error
    return known
