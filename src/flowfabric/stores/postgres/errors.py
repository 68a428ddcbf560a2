"""What the driver's errors mean to a caller of the port."""

from __future__ import annotations

import os
import re
import socket
from typing import Any

import asyncpg

from flowfabric.errors import StoreFault, StoreUnavailable
from flowfabric.handles import BackendTag
from flowfabric.stores.port import Collision, Unstorable

BACKEND_FACTS: dict[str, Any] = {"backend": BackendTag.POSTGRES.title}

# What a connection can end with. The driver's "internal" error is what a call meets when the server has just left.
CONNECTION_ERRORS = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, TimeoutError)

# By the first letters of the server's code (appendix A of its manual).
_CONNECTION = ("08", "57P", "58")  # connection exception, operator's intervention, system error
_VALUES = ("22", "23", "54", "21")  # data exception, integrity, limit exceeded, cardinality
_PASSING = ("40001", "40P01")  # serialization failure, deadlock
_POOLED = ("26000", "42P05", "34000")  # a prepared statement is unknown, known already, or ran elsewhere
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
    """How far a call had come when it failed."""

    def __init__(self, *, connecting: bool = False) -> None:
        self.connecting = connecting
        self.sent = False  # whether the words that make it last may have reached the server
        self.connection_lost = False  # whether the connection can no longer be trusted
        self.wrong_server = False  # whether another one may lead to a server, or be a session, that writes


class TransactionConflict(StoreUnavailable):
    """The server undid a statement for the sake of another one; it may be sent again."""


_REFUSED = re.compile(r"Connect call failed \('(?P<host>[^']*)', (?P<port>\d+)")  # how asyncio puts it


def translate_error(error: Any, fault: CallProgress, *, closed: bool) -> Any:
    """The error as the port knows it; what did not come from the server or its connection stays what it is."""
    if isinstance(error, asyncpg.PostgresError):
        code: str = error.sqlstate or ""
        if not fault.connecting and not closed:
            if code in _PASSING:
                return TransactionConflict(str(error), **BACKEND_FACTS, source=StoreFault.TRANSPORT, in_doubt=False)
            if code == "23505":
                return Collision(str(error))
            if code.startswith(_VALUES):
                return Unstorable(f"{error} ({code})")
        fault.connection_lost = closed or code.startswith(_CONNECTION)
        fault.wrong_server = code == _READ_ONLY
        source = next((source for start, source in _SOURCES if code.startswith(start)), StoreFault.OTHER)
        if fault.connecting and source is StoreFault.PROTOCOL:
            source = StoreFault.TRANSPORT  # what poolers say whenever they have no place or no server for us now
        return _unavailable(error, source, fault)
    if isinstance(error, OverflowError | UnicodeError):
        return Unstorable(str(error))
    if isinstance(error, TimeoutError):
        fault.connection_lost = True
        return _unavailable(error, StoreFault.TIMEOUT, fault)
    if isinstance(error, OSError | asyncpg.InternalClientError) or (
        closed and isinstance(error, asyncpg.InterfaceError)
    ):
        fault.connection_lost = True
        return _unavailable(error, StoreFault.TRANSPORT, fault)
    return error


def _unavailable(error: BaseException, source: StoreFault, fault: CallProgress) -> StoreUnavailable:
    detail = _connection_words(error) or str(error)
    detail = detail or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
    code = getattr(error, "sqlstate", None)
    if code == _READ_ONLY:
        detail += "; the server is a standby, or default_transaction_read_only is on"
    elif code in _POOLED:
        said, _, _ = detail.partition("\n")  # the driver goes on about options that are its own
        detail = f"{said}; through a pooler in transaction mode the URL needs statement_cache=off"
    return StoreUnavailable(
        detail,
        **BACKEND_FACTS,
        source=source,
        in_doubt=fault.connection_lost and fault.sent,
    )


def _connection_words(error: BaseException) -> str:
    """What the system says about a connection that was not made, without Python's numbers and tuples."""
    if not isinstance(error, OSError) or isinstance(error, TimeoutError):
        return ""
    if isinstance(error, socket.gaierror):
        return f"the name of the host could not be resolved: {(error.strerror or '').lower()}"
    found = _REFUSED.search(str(error))
    if found is None or error.errno is None:
        return ""
    return f"{found['host']}:{found['port']}: {os.strerror(error.errno).lower()}"
