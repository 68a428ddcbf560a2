"""Translation of driver errors to errors of the store port."""

from __future__ import annotations

import os
import re
import socket
from typing import Any

import asyncpg

from flowfabric.errors import StoreFault, StoreUnavailable
from flowfabric.handles import BackendTag
from flowfabric.stores.verdicts import Collision, Unstorable

BACKEND_FACTS: dict[str, Any] = {"backend": BackendTag.POSTGRES.title}

# Errors that end a connection. The driver raises its "internal" error if the server has just closed the connection.
CONNECTION_ERRORS = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, TimeoutError)

# Prefixes of SQLSTATE codes (appendix A of the manual).
_CONNECTION = ("08", "57P", "58")  # connection exception, operator's intervention, system error
VALUE_ERRORS = ("22", "23", "54", "21")  # data exception, integrity, limit exceeded, cardinality
_CONFLICTS = ("40001", "40P01")  # serialization failure, deadlock
_POOLED = ("26000", "42P05", "34000")  # a prepared statement is missing, exists already, or its portal is missing
_READ_ONLY = "25006"
_SOURCES = (
    ("57P03", StoreFault.BUSY_LOADING),
    ("28", StoreFault.AUTH),
    ("42501", StoreFault.AUTH),
    ("57014", StoreFault.TIMEOUT),
    ("55P03", StoreFault.TIMEOUT),
    ("08P01", StoreFault.PROTOCOL),
    ("26", StoreFault.PROTOCOL),
    ("34", StoreFault.PROTOCOL),
    ("42P05", StoreFault.PROTOCOL),
    (_READ_ONLY, StoreFault.CLUSTER),
    ("08", StoreFault.TRANSPORT),
    ("57P", StoreFault.TRANSPORT),
    ("53", StoreFault.TRANSPORT),
    ("58", StoreFault.TRANSPORT),
)


class CallProgress:
    """How far a call had proceeded when it failed."""

    def __init__(self, *, connecting: bool = False) -> None:
        self.connecting = connecting
        self.sent = False  # True if the server may have received the statement that commits
        self.connection_lost = False  # True if the connection must not be used again
        self.wrong_server = False  # True if the server or session is read-only and another one may not be


class TransactionConflict(StoreUnavailable):
    """The server rolled back a statement because of a conflict with another one; it may be retried."""


_REFUSED = re.compile(r"Connect call failed \('(?P<host>[^']*)', (?P<port>\d+)")  # the text of asyncio


def translate_error(error: Any, progress: CallProgress, *, closed: bool) -> Any:
    """Translate an error of the server or its connection to one of the port; return others unchanged."""
    if isinstance(error, asyncpg.PostgresError):
        code: str = error.sqlstate or ""
        if not progress.connecting and not closed:
            if code in _CONFLICTS:
                return TransactionConflict(str(error), **BACKEND_FACTS, source=StoreFault.TRANSPORT, in_doubt=False)
            if code == "23505":
                return Collision(str(error))
            if code.startswith(VALUE_ERRORS):
                return Unstorable(f"{error} ({code})")
        progress.connection_lost = closed or code.startswith(_CONNECTION)
        progress.wrong_server = code == _READ_ONLY
        source = next((source for start, source in _SOURCES if code.startswith(start)), StoreFault.OTHER)
        if progress.connecting and source is StoreFault.PROTOCOL:
            source = StoreFault.TRANSPORT  # poolers report this if they have no free slot or no server at the moment
        return _unavailable(error, source, progress)
    if isinstance(error, OverflowError | UnicodeError):
        return Unstorable(str(error))
    if isinstance(error, TimeoutError):
        progress.connection_lost = True
        return _unavailable(error, StoreFault.TIMEOUT, progress)
    if isinstance(error, OSError | asyncpg.InternalClientError) or (
        closed and isinstance(error, asyncpg.InterfaceError)
    ):
        progress.connection_lost = True
        return _unavailable(error, StoreFault.TRANSPORT, progress)
    return error


def _unavailable(error: BaseException, source: StoreFault, progress: CallProgress) -> StoreUnavailable:
    detail = _connection_message(error) or str(error)
    detail = detail or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
    code = getattr(error, "sqlstate", None)
    if code == _READ_ONLY:
        detail += "; the server is a standby, or default_transaction_read_only is on"
    elif code in _POOLED:
        first_line, _, _ = detail.partition("\n")  # the driver adds advice about its own options
        detail = f"{first_line}; through a pooler in transaction mode the URL needs statement_cache=off"
    return StoreUnavailable(
        detail,
        **BACKEND_FACTS,
        source=source,
        in_doubt=progress.connection_lost and progress.sent,
    )


def _connection_message(error: BaseException) -> str:
    """Return the system's message about a failed connection attempt, without Python's formatting."""
    if not isinstance(error, OSError) or isinstance(error, TimeoutError):
        return ""
    if isinstance(error, socket.gaierror):
        return f"the name of the host could not be resolved: {(error.strerror or '').lower()}"
    match = _REFUSED.search(str(error))
    if match is None or error.errno is None:
        return ""
    return f"{match['host']}:{match['port']}: {os.strerror(error.errno).lower()}"
