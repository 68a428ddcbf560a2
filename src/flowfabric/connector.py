"""`connect`: opens the engine that a URL names, on a store or as a client of a server."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from flowfabric import errors
from flowfabric.clock import Clock
from flowfabric.engine.engine import Engine
from flowfabric.ids import Minter
from flowfabric.settings import Deadlines, Secret, Settings
from flowfabric.stores.port import Store

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.stores.valkey.address import ValkeyAddress

VALKEY_SCHEMES = ("valkey", "valkeys", "redis", "rediss")  # with +cluster for a cluster


async def connect(
    url: str,
    *,
    migrate: bool = True,
    settings: Settings | None = None,
    minter: Minter | None = None,
    clock: Clock | None = None,
    token: str | None = None,
) -> EngineAPI:
    """Open an engine on `memory://`, `sqlite:///path`, `postgresql://…`, `valkey://…` or `valkey+cluster://…`.

    `migrate` updates the store's schema.

    `http://…` and `https://…` name a server: the returned client has the engine's operations and sends them to the
    server, with `token`, or by default FLOWFABRIC_TOKEN or FF_API_TOKEN.

    `settings.deadlines` are the timeouts of connections. A Postgres URL may set them with libpq's names:
    `connect_timeout`, `keepalives_idle`, `keepalives_interval` (seconds), `keepalives_count`, `tcp_user_timeout`
    (milliseconds), and `command_timeout` (seconds) for one statement. For a server FLOWFABRIC_TIMEOUT is the timeout of
    one request in seconds.

    A pooler in front of Postgres is detected, and prepared statements are then avoided. `?statement_cache=on` uses them
    nevertheless, which is faster, for a pooler in session mode or one that supports them; `off` avoids them if the
    pooler was not detected.

    `clock` replaces the store's clock, for tests. `FF_SECRET_KEY` encrypts signing keys if the settings have no key.
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
        schema = await store.open(migrate=migrate, partitions=settings.partitions)
    except BaseException:
        await store.close()
        raise
    engine = Engine(store, settings=settings, minter=minter, schema=schema)
    try:
        await engine.refresh_lanes()
    except BaseException:
        await engine.close()
        raise
    return engine


async def backup(url: str, target: str | os.PathLike[str]) -> int:
    """Copy a SQLite store, which may be in use, to a new file, and check the copy; return its size in bytes.

    For other stores this raises `InvalidInput`, which names the tool to use.
    """
    if is_server_url(url):
        raise errors.InvalidInput("url: a server keeps its own store: back that up where it runs")
    scheme, rest = _split(url)
    match scheme:
        case "sqlite":
            from flowfabric.stores.sqlite.backup import create_backup

            return await asyncio.to_thread(create_backup, Path(_parse_sqlite(rest)[0]), Path(target))
        case "postgresql" | "postgres":
            raise errors.InvalidInput("url: back Postgres up with pg_dump, or with pg_basebackup and its log")
        case _ if scheme.removesuffix("+cluster") in VALKEY_SCHEMES:
            raise errors.InvalidInput("url: back Valkey up by copying the append-only files of each primary")
        case _:
            raise errors.InvalidInput("url: only a sqlite:///path can be copied")


def is_server_url(url: str) -> bool:
    """True if a URL names a server instead of a store."""
    return str(url).startswith(("http://", "https://"))


def public_base_url(url: str, named: str | None = None) -> str:
    """Return the base URL of links: `named`, or FF_PUBLIC_URL, or the server at `url`, or a server on this machine."""
    if chosen := named or os.environ.get("FF_PUBLIC_URL"):
        return chosen.rstrip("/")
    if not is_server_url(url):
        return "http://127.0.0.1:9090"
    parts = urlsplit(url)  # without the user info: links are sent to others
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
    token = token or os.environ.get("FLOWFABRIC_TOKEN") or os.environ.get("FF_API_TOKEN")
    return await RemoteEngine.connect(
        url, token=None if token is None else Secret(token), settings=settings, minter=minter
    )


def open_store(
    url: str, *, clock: Clock | None = None, pool_size: int | None = None, deadlines: Deadlines | None = None
) -> Store:
    """Return the store that a URL names, not connected yet; `pool_size` is for Postgres, `deadlines` for servers."""
    if not isinstance(url, str):
        raise errors.InvalidInput("url: not a text")
    scheme, rest = _split(url)
    try:
        urlsplit(url)
    except ValueError as error:
        raise errors.InvalidInput(f"url: {error}") from error
    match scheme:
        case "memory":
            from flowfabric.stores.memory.store import MemoryStore

            return MemoryStore(clock=clock)
        case "sqlite":
            from flowfabric.stores.sqlite import SQLiteStore

            path, options = _parse_sqlite(rest)
            return SQLiteStore(path, clock=clock, synchronous=options.get("synchronous", "FULL").upper())
        case "postgresql" | "postgres":
            try:
                from flowfabric.stores.postgres import PostgresStore
            except ImportError as missing:
                raise errors.InvalidInput(
                    "url: Postgres needs its driver: pip install 'flowfabric[postgres]'"
                ) from missing
            dsn, cache = parse_postgres_url(url)
            pool: dict[str, Any] = {} if pool_size is None else {"pool_size": pool_size}
            deadlines = postgres_deadlines(url, deadlines)
            return PostgresStore(dsn, clock=clock, statement_cache=cache, deadlines=deadlines, **pool)
        case _ if scheme.removesuffix("+cluster") in VALKEY_SCHEMES:
            try:
                from flowfabric.stores.valkey.address import parse_url
                from flowfabric.stores.valkey.store import ValkeyStore
            except ImportError as missing:
                raise errors.InvalidInput("url: Valkey needs its driver: pip install 'flowfabric[valkey]'") from missing
            return ValkeyStore(parse_url(url), clock=clock, deadlines=deadlines)
        case _:
            raise errors.InvalidInput(
                f"url: {scheme or url!r} is no known store; "
                "use memory://, sqlite:///path, postgresql://…, valkey://… or http://…"
            )


def _split(url: str) -> tuple[str, str]:
    scheme, separator, rest = url.partition("://")
    return (scheme, rest) if separator else ("", url)


def parse_valkey_url(url: str) -> ValkeyAddress:
    """Return the address that a URL of Valkey or Redis names."""
    from flowfabric.stores.valkey.address import parse_url

    return parse_url(url)


def parse_postgres_url(url: str) -> tuple[str, bool | None]:
    """Return the URL for the driver, without options of this library, and `statement_cache` if it is set."""
    address, _, query = url.partition("?")
    options = query.split("&") if query else []
    cache = [value for name, value in parse_qsl(query, keep_blank_values=True) if name == "statement_cache"]
    if unknown := [value for value in cache if value not in ("on", "off")]:
        raise errors.InvalidInput(f"url: statement_cache is on or off, not {unknown[0]!r}")
    own_options = {"statement_cache", *_DEADLINE_FIELDS}
    others = "&".join(option for option in options if option.partition("=")[0] not in own_options)
    return f"{address}?{others}" if others else address, cache[-1] == "on" if cache else None


# Options of a Postgres URL, with libpq's names, and the fields of `Deadlines` that they set.
_DEADLINE_FIELDS = {
    "connect_timeout": "connect_s",
    "command_timeout": "command_s",
    "keepalives_idle": "keepalives_idle_s",
    "keepalives_interval": "keepalives_interval_s",
    "keepalives_count": "keepalives_count",
    "tcp_user_timeout": "tcp_user_timeout_ms",
}


def postgres_deadlines(url: str, default: Deadlines | None = None) -> Deadlines:
    """Return the deadlines with those that a Postgres URL sets."""
    changes: dict[str, float | int] = {}
    for name, text in parse_qsl(url.partition("?")[2], keep_blank_values=True):
        if (field := _DEADLINE_FIELDS.get(name)) is not None:
            value = _number(f"url: {name}", text)
            if field not in ("connect_s", "command_s") and value != int(value):
                raise errors.InvalidInput(f"url: {name} is a whole number, not {text!r}")
            changes[field] = value if field in ("connect_s", "command_s") else int(value)
    return msgspec.structs.replace(default or Deadlines(), **changes)


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e6:
        raise errors.InvalidInput(f"{name} is a number of at most 1000000, not {text!r}")
    return value


def _parse_sqlite(rest: str) -> tuple[str, dict[str, str]]:
    """Return path and options of a SQLite URL, read as SQLAlchemy does: three slashes are relative, four absolute."""
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
