"""Open an engine for the URL of a store or a server."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from flowfabric import errors
from flowfabric.clock import Clock
from flowfabric.engine.engine import Engine
from flowfabric.engine_api import EngineAPI
from flowfabric.ids import Minter
from flowfabric.settings import Deadlines, Secret, Settings
from flowfabric.stores.port import Store


async def connect(
    url: str,
    *,
    migrate: bool = True,
    settings: Settings | None = None,
    minter: Minter | None = None,
    clock: Clock | None = None,
    token: str | None = None,
) -> EngineAPI:
    """Open an engine on `memory://`, `sqlite:///path` or `postgresql://…`; with `migrate`, migrate its schema first.

    For `http://…` and `https://…`, return a remote engine whose operations are requests to that server, with `token`,
    else FLOWFABRIC_TOKEN or FF_API_TOKEN.

    How soon a silent connection is given up is `settings.deadlines`. A Postgres URL may set it, too, in the words of
    libpq: `connect_timeout`, `keepalives_idle`, `keepalives_interval` (seconds), `keepalives_count`, `tcp_user_timeout`
    (milliseconds), and `command_timeout` (seconds) for one statement. For a server FLOWFABRIC_TIMEOUT is the seconds
    for one request.

    A pooler before Postgres, in whichever mode, is noticed and served with care; `?statement_cache=on` says that it
    keeps sessions apart or knows prepared statements, which is faster, and `off` that it was not noticed.

    `clock` replaces the store's own clock, for tests. `FF_SECRET_KEY` seals signing keys when the settings name no key.
    """
    if is_server_url(url):
        return await _remote(url, token, settings or Settings(), minter)
    return await open_engine(url, migrate=migrate, settings=settings, minter=minter, clock=clock)


async def open_engine(
    url: str,
    *,
    migrate: bool = True,
    settings: Settings | None = None,
    minter: Minter | None = None,
    clock: Clock | None = None,
) -> Engine:
    """Open an engine on a store, with all its operations; the address of a server is refused."""
    settings = settings or Settings()
    if settings.secret_key is None and (secret := os.environ.get("FF_SECRET_KEY")):
        settings = msgspec.structs.replace(settings, secret_key=Secret(secret))
    store = open_store(url, clock=clock, pool_size=settings.postgres_pool_size, deadlines=settings.deadlines)
    try:
        schema = await store.open(migrate=migrate)
    except BaseException:
        await store.close()
        raise
    return Engine(store, settings=settings, minter=minter, schema=schema)


async def backup(url: str, target: str | os.PathLike[str]) -> int:
    """Copy a SQLite store that is in use to a new file, checked and whole; its size in bytes. The copy is a store.

    Other stores have means of their own, which the refusal names.
    """
    if is_server_url(url):
        raise errors.InvalidInput("url: a server keeps its own store: back that up where it runs")
    scheme, rest = _split(url)
    match scheme:
        case "sqlite":
            from flowfabric.stores.sqlite.backup import create_backup

            return await asyncio.to_thread(create_backup, Path(_sqlite(rest)[0]), Path(target))
        case "postgresql" | "postgres":
            raise errors.InvalidInput("url: back Postgres up with pg_dump, or with pg_basebackup and its log")
        case _:
            raise errors.InvalidInput("url: only a sqlite:///path can be copied")


def is_server_url(url: str) -> bool:
    """Whether a URL names a server instead of a store."""
    return str(url).startswith(("http://", "https://"))


def public_base_url(url: str, named: str | None = None) -> str:
    """Where links lead: as named, else FF_PUBLIC_URL, else to the server at this URL, else to one on this machine."""
    if chosen := named or os.environ.get("FF_PUBLIC_URL"):
        return chosen.rstrip("/")
    if not is_server_url(url):
        return "http://127.0.0.1:9090"
    parts = urlsplit(url)  # links are for everybody: a password in the address is not
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")


async def _remote(url: str, token: str | None, settings: Settings, minter: Minter | None) -> EngineAPI:
    try:
        from flowfabric.client import RemoteEngine
    except ImportError as missing:
        raise errors.InvalidInput("url: a server needs the client: pip install 'flowfabric[client]'") from missing
    if timeout := os.environ.get("FLOWFABRIC_TIMEOUT"):
        command_s = _number("FLOWFABRIC_TIMEOUT", timeout)
        deadlines = msgspec.structs.replace(settings.deadlines, command_s=command_s)
        settings = msgspec.structs.replace(settings, deadlines=deadlines)
    given = token or os.environ.get("FLOWFABRIC_TOKEN") or os.environ.get("FF_API_TOKEN")
    return await RemoteEngine.connect(
        url, token=None if given is None else Secret(given), settings=settings, minter=minter
    )


def open_store(
    url: str, *, clock: Clock | None = None, pool_size: int | None = None, deadlines: Deadlines | None = None
) -> Store:
    """The store that a URL names, not yet connected; `pool_size` and `deadlines` are for Postgres."""
    if not isinstance(url, str):
        raise errors.InvalidInput("url: not a text")
    scheme, rest = _split(url)
    try:
        urlsplit(url)
    except ValueError as fault:
        raise errors.InvalidInput(f"url: {fault}") from fault
    match scheme:
        case "memory":
            from flowfabric.stores.memory.store import MemoryStore

            return MemoryStore(clock=clock)
        case "sqlite":
            from flowfabric.stores.sqlite import SQLiteStore

            path, options = _sqlite(rest)
            return SQLiteStore(path, clock=clock, synchronous=options.get("synchronous", "FULL").upper())
        case "postgresql" | "postgres":
            try:
                from flowfabric.stores.postgres import PostgresStore
            except ImportError as missing:
                raise errors.InvalidInput(
                    "url: Postgres needs its driver: pip install 'flowfabric[postgres]'"
                ) from missing
            dsn, cache = parse_postgres_url(url)
            ways: dict[str, Any] = {"statement_cache": cache, "deadlines": postgres_deadlines(url, deadlines)}
            if pool_size is not None:
                ways["pool_size"] = pool_size
            return PostgresStore(dsn, clock=clock, **ways)
        case "valkey" | "valkey+cluster":
            raise errors.InvalidInput(
                "url: there is no Valkey store in this release; use sqlite:///path or postgresql://…"
            )
        case _:
            raise errors.InvalidInput(
                f"url: {scheme or url!r} is no known store; use memory://, sqlite:///path, postgresql://… or http://…"
            )


def _split(url: str) -> tuple[str, str]:
    scheme, found, rest = url.partition("://")
    return (scheme, rest) if found else ("", url)


def parse_postgres_url(url: str) -> tuple[str, bool | None]:
    """The address as the driver knows it, and what it says about `statement_cache`, which is an option of ours."""
    address, _, query = url.partition("?")
    options = query.split("&") if query else []
    said = [value for name, value in parse_qsl(query, keep_blank_values=True) if name == "statement_cache"]
    if unknown := [value for value in said if value not in ("on", "off")]:
        raise errors.InvalidInput(f"url: statement_cache is on or off, not {unknown[0]!r}")
    ours = {"statement_cache", *_DEADLINES}
    others = "&".join(option for option in options if option.partition("=")[0] not in ours)
    return f"{address}?{others}" if others else address, said[-1] == "on" if said else None


# Options of a Postgres URL, named as libpq names them, and the fields that they set.
_DEADLINES = {
    "connect_timeout": "connect_s",
    "command_timeout": "command_s",
    "keepalives_idle": "keepalives_idle_s",
    "keepalives_interval": "keepalives_interval_s",
    "keepalives_count": "keepalives_count",
    "tcp_user_timeout": "tcp_user_timeout_ms",
}


def postgres_deadlines(url: str, default: Deadlines | None = None) -> Deadlines:
    """The deadlines that a Postgres URL sets; the others are the default's."""
    told: dict[str, float | int] = {}
    for name, text in parse_qsl(url.partition("?")[2], keep_blank_values=True):
        if (field := _DEADLINES.get(name)) is not None:
            value = _number(f"url: {name}", text)
            if field not in ("connect_s", "command_s") and value != int(value):
                raise errors.InvalidInput(f"url: {name} is a whole number, not {text!r}")
            told[field] = value if field in ("connect_s", "command_s") else int(value)
    return msgspec.structs.replace(default or Deadlines(), **told)


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e6:
        raise errors.InvalidInput(f"{name} is a number of at most 1000000, not {text!r}")
    return value


def _sqlite(rest: str) -> tuple[str, dict[str, str]]:
    """`/relative.db` and `//absolute.db`, as SQLAlchemy writes them: three slashes are relative, four absolute."""
    parts = urlsplit(f"sqlite://{rest}")
    path = parts.path[1:] if parts.path.startswith("/") else parts.path
    if parts.netloc or not path:
        raise errors.InvalidInput("url: write sqlite:///relative.db or sqlite:////absolute/path.db")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(options.keys() - {"synchronous"}):
        raise errors.InvalidInput(
            f"url: {unknown[0]!r} is no option of SQLite's; there is synchronous=NORMAL|FULL|EXTRA"
        )
    return path, options
