"""Translation of driver errors to errors of the store port."""

from __future__ import annotations

import apsw

from flowfabric.errors import StoreFault, StoreUnavailable
from flowfabric.handles import BackendTag
from flowfabric.stores.verdicts import Collision, Unstorable

BACKEND = BackendTag.SQLITE.title

# The file cannot be read or written at the moment; nothing was written.
_UNAVAILABLE: dict[type[apsw.Error], StoreFault] = {
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

_DUPLICATE_KEY = (apsw.SQLITE_CONSTRAINT_UNIQUE, apsw.SQLITE_CONSTRAINT_PRIMARYKEY, apsw.SQLITE_CONSTRAINT_ROWID)
_UNSTORABLE = (apsw.ConstraintError, apsw.MismatchError, apsw.TooBigError, apsw.RangeError)


def unavailable(detail: str, source: StoreFault = StoreFault.OTHER) -> StoreUnavailable:
    """Return the error for a failed access to the file; nothing was written."""
    return StoreUnavailable(detail, backend=BACKEND, source=source, in_doubt=False)


def translate_error(error: Exception) -> Exception:
    """Translate a driver error to one of the port, with its cause; return unexpected errors unchanged."""
    translated: Exception | None = None
    if isinstance(error, apsw.ConstraintError) and getattr(error, "extendedresult", None) in _DUPLICATE_KEY:
        translated = Collision(str(error))
    elif isinstance(error, (*_UNSTORABLE, OverflowError, UnicodeEncodeError)):  # the last two before it was sent
        translated = Unstorable(str(error))
    elif isinstance(error, OSError):  # the lock file could not be used
        translated = unavailable(str(error), StoreFault.TRANSPORT)
    else:
        source = next((source for kind, source in _UNAVAILABLE.items() if isinstance(error, kind)), None)
        if source is not None:
            translated = unavailable(str(error), source)
    if translated is None:
        return error
    translated.__cause__ = error
    return translated
