"""The scratch store on Valkey: an empty database of the named server, and bare functions there, by the same driver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.metadata import version
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import libvalkey

from flowfabric.bench.scratch_store import BATCH, ScratchStore, paced
from flowfabric.connector import parse_valkey_url
from flowfabric.errors import InvalidInput, StoreUnavailable

# A queue as one would write it by hand: a list of ready ids, a hash of payloads, a sorted set of leases, a hash of
# results. Chains: a hash of the states of all steps, by chain and place.
_LIBRARY = """#!lua name=ff_bench
local function insert(keys, arguments)
  local last, rows, ids = redis.call('INCRBY', keys[1], #arguments), {}, {}
  for i, payload in ipairs(arguments) do
    local id = last - #arguments + i
    ids[i], rows[2 * i - 1], rows[2 * i] = id, id, payload
  end
  redis.call('HSET', keys[2], unpack(rows))
  redis.call('RPUSH', keys[3], unpack(ids))
  return last
end

local function claim(keys, arguments)
  local ids = redis.call('LPOP', keys[3], arguments[1])
  if not ids then return {} end
  local time, leases = redis.call('TIME'), {}
  for i, id in ipairs(ids) do leases[2 * i - 1], leases[2 * i] = tonumber(time[1]) + 30, id end
  redis.call('ZADD', keys[4], unpack(leases))
  return { ids, redis.call('HMGET', keys[2], unpack(ids)) }
end

local function finish(keys, arguments)
  local ended, ids = {}, {}
  for i = 1, #arguments, 2 do
    if redis.call('ZREM', keys[4], arguments[i]) == 1 then
      ids[#ids + 1] = arguments[i]
      ended[#ended + 1] = arguments[i]
      ended[#ended + 1] = arguments[i + 1]
    end
  end
  if #ids > 0 then
    redis.call('HSET', keys[5], unpack(ended))
    redis.call('HDEL', keys[2], unpack(ids))
  end
  return #ids
end

local function create_chains(keys, arguments)
  local first, count, steps = tonumber(arguments[1]), tonumber(arguments[2]), tonumber(arguments[3])
  for chain = first, first + count - 1 do
    local fields = {}
    for place = 1, steps do
      fields[#fields + 1] = chain .. ':' .. place
      fields[#fields + 1] = place == 1 and 'running' or 'waiting'
      if #fields == 2000 then
        redis.call('HSET', keys[6], unpack(fields))
        fields = {}
      end
    end
    if #fields > 0 then redis.call('HSET', keys[6], unpack(fields)) end
  end
  return count
end

local function go_on(keys, arguments)
  local started, behind, fields = {}, {}, {}
  for i = 1, #arguments, 3 do
    local chain, place = arguments[i], arguments[i + 1]
    fields[#fields + 1] = chain .. ':' .. place
    fields[#fields + 1] = 'done ' .. arguments[i + 2]
    behind[#behind + 1] = chain .. ':' .. (tonumber(place) + 1)
  end
  local states = redis.call('HMGET', keys[6], unpack(behind))
  for i, state in ipairs(states) do
    if state == 'waiting' then
      started[#started + 1] = arguments[3 * i - 2]
      fields[#fields + 1] = behind[i]
      fields[#fields + 1] = 'running'
    end
  end
  redis.call('HSET', keys[6], unpack(fields))
  return started
end

local function cancel(keys, arguments)
  local cancelled = 0
  for place = 1, tonumber(arguments[2]) do
    local name = arguments[1] .. ':' .. place
    if redis.call('HGET', keys[6], name) == 'waiting' then
      redis.call('HSET', keys[6], name, 'cancelled')
      cancelled = cancelled + 1
    end
  end
  return cancelled
end

redis.register_function('ff_bench_insert', insert)
redis.register_function('ff_bench_claim', claim)
redis.register_function('ff_bench_finish', finish)
redis.register_function('ff_bench_create_chains', create_chains)
redis.register_function('ff_bench_go_on', go_on)
redis.register_function('ff_bench_cancel', cancel)
"""
_TAG = "{ff_bench}"
_KEYS = tuple(f"{_TAG}:{name}" for name in ("last", "payload", "ready", "lease", "result", "step"))
_OWNER = f"{_TAG}:owner"  # marks a database that a benchmark uses
_DATABASES = 16
_CHANNEL = "ff_bench"

TIMEOUT_S = 10.0  # time to wait for a notification


_NOT_ENOUGH = object()
_REPLY_ERROR: type[Exception] = libvalkey.ReplyError


class BareConnection:
    """A connection that waits for each reply."""

    def __init__(self, stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._stream = stream
        self._writer = writer
        self._reader = libvalkey.Reader(notEnoughData=_NOT_ENOUGH)

    async def call(self, *arguments: Any) -> Any:
        """Send a command; return its reply or raise its error."""
        (reply,) = await self.call_all(arguments)
        return reply

    async def call_all(self, *commands: Iterable[Any]) -> list[Any]:
        """Send commands at once; return their replies."""
        self._writer.writelines([libvalkey.pack_command(tuple(command)) for command in commands])
        return [await self.reply() for _ in commands]

    async def reply(self) -> Any:
        """Wait for the next reply or message."""
        while (reply := self._reader.gets()) is _NOT_ENOUGH:
            data = await self._stream.read(65536)
            if not data:
                raise StoreUnavailable("the server closed the connection", backend="valkey", in_doubt=False)
            self._reader.feed(data)
        if isinstance(reply, _REPLY_ERROR):
            raise reply
        return reply

    async def close(self) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


class ValkeyControl:
    """Bare functions, on one connection."""

    def __init__(self, connection: BareConnection, url: str, location: tuple[str, int]) -> None:
        self._connection = connection
        self._url = url
        self._location = location
        self._chains = 0  # chains created so far

    async def insert(self, payloads: Sequence[bytes]) -> None:
        for begin in range(0, len(payloads), BATCH):
            await self._connection.call(*_function("insert", *payloads[begin : begin + BATCH]))

    async def drain(self) -> int:
        done = 0
        while claimed := await self._connection.call(*_function("claim", BATCH)):
            done += await _finish(self._connection, claimed[0])
        return done

    async def latencies(self, payload: bytes, *, count: int, per_second: int) -> list[float]:
        worker, listener = await _connect(self._url, self._location), await _connect(self._url, self._location)
        try:
            await listener.call("SUBSCRIBE", _CHANNEL)
            latencies_ms: list[float] = []
            async for _ in paced(count, per_second):
                started = perf_counter()
                commands = (_function("insert", payload), ("PUBLISH", _CHANNEL, b""))
                submitted = asyncio.create_task(self._connection.call_all(*commands))
                await asyncio.wait_for(listener.reply(), TIMEOUT_S)
                ids, _ = await worker.call(*_function("claim", 1))
                latencies_ms.append((perf_counter() - started) * 1000)
                await _finish(worker, ids)
                await submitted
            return latencies_ms
        finally:
            await worker.close()
            await listener.close()

    async def chains(self, chains: int, steps: int, in_flight: int) -> int:
        ended = 0
        for begun in range(0, chains, in_flight):
            first, count = await self._create_chains(min(in_flight, chains - begun), steps)
            running, place = [b"%d" % chain for chain in range(first, first + count)], 1
            while running:
                ended += len(running)
                arguments = [one for chain in running for one in (chain, place, b"done")]
                running = await self._connection.call(*_function("go_on", *arguments))
                place += 1
        return ended

    async def cancel(self, rows: int) -> float:
        chain, _ = await self._create_chains(1, rows + 1)
        started = perf_counter()
        await self._connection.call(*_function("cancel", chain, rows + 1))
        return perf_counter() - started

    async def _create_chains(self, chains: int, steps: int) -> tuple[int, int]:
        """Create chains; return the number of the first one, and how many there are."""
        first = self._chains + 1
        self._chains += chains
        await self._connection.call(*_function("create_chains", first, chains, steps))
        return first, chains

    async def vacuum(self) -> None:
        """Do nothing: the server updates rows in place."""


@asynccontextmanager
async def valkey_scratch_store(url: str) -> AsyncIterator[ScratchStore]:
    """Use an empty database of the server, emptied at the end. A cluster has one database, which has to be empty."""
    scratch_url, primaries = await _empty_database(url)
    try:
        location, connection = await _owner(primaries)
        await connection.call("FUNCTION", "LOAD", "REPLACE", _LIBRARY)
        control = ValkeyControl(connection, scratch_url, location)
        cpu_s = partial(_cpu_s, [*primaries.values()])
        durability, versions = await _durability(connection), await _versions(connection)
        yield ScratchStore(scratch_url, durability, versions, control, server_cpu_s=cpu_s)
    finally:
        for primary in primaries.values():
            await primary.call("FLUSHDB")
            await primary.close()


async def _empty_database(url: str) -> tuple[str, dict[tuple[str, int], BareConnection]]:
    """Return the URL of an empty database, and connections to all primaries that hold it."""
    named = parse_valkey_url(url)
    if named.is_cluster:
        primaries = await _primaries(url, named.hosts[0])
        if not any([await primary.call("DBSIZE") for primary in primaries.values()]):
            return url, primaries
        for primary in primaries.values():
            await primary.close()
    for database in () if named.is_cluster else reversed(range(_DATABASES)):
        scratch_url = urlunsplit(urlsplit(url)._replace(path=f"/{database}"))
        connection = await _connect(scratch_url, named.hosts[0])
        with suppress(_REPLY_ERROR):  # the server has fewer databases
            await connection.call("SELECT", database)
            is_other = database != named.database
            if is_other and not await connection.call("DBSIZE") and await connection.call("SET", _OWNER, 1, "NX"):
                return scratch_url, {named.hosts[0]: connection}
        await connection.close()
    raise InvalidInput("store: the benchmark needs an empty database of the server, or an empty cluster")


async def _primaries(url: str, host: tuple[str, int]) -> dict[tuple[str, int], BareConnection]:
    """Connect to all primaries of a cluster."""
    first, primaries = await _connect(url, host), dict[tuple[str, int], BareConnection]()
    for line in (await first.call("CLUSTER", "NODES")).decode().splitlines():
        _, address, flags, *_ = line.split()
        if "master" in flags:
            name, _, port = address.partition("@")[0].rpartition(":")
            location = name or host[0], int(port)
            primaries[location] = await _connect(url, location)
    await first.close()
    return primaries


async def _owner(
    primaries: dict[tuple[str, int], BareConnection],
) -> tuple[tuple[str, int], BareConnection]:
    """Return the primary that holds the keys of the control."""
    for location, primary in primaries.items():
        with suppress(_REPLY_ERROR):  # MOVED
            await primary.call("SET", _OWNER, 1)
            return location, primary
    raise StoreUnavailable("no primary serves the control", backend="valkey", in_doubt=False)


async def _connect(url: str, location: tuple[str, int]) -> BareConnection:
    address = parse_valkey_url(url)
    try:
        stream, writer = await asyncio.open_connection(*location, ssl=address.tls_context(), limit=2**20)
    except OSError as error:
        raise StoreUnavailable(str(error), backend="valkey", in_doubt=False) from error
    connection = BareConnection(stream, writer)
    if address.password is not None:
        user = () if address.username is None else (address.username,)
        await connection.call("AUTH", *user, address.password.reveal())
    if address.database:
        with suppress(_REPLY_ERROR):  # the next command that needs the database selects it again
            await connection.call("SELECT", address.database)
    return connection


async def _finish(connection: BareConnection, ids: Sequence[bytes]) -> int:
    done: int = await connection.call(*_function("finish", *(one for name in ids for one in (name, b"done"))))
    return done


def _function(name: str, *arguments: Any) -> tuple[Any, ...]:
    return ("FCALL", f"ff_bench_{name}", len(_KEYS), *_KEYS, *arguments)


async def _durability(connection: BareConnection) -> str:
    names = ("appendonly", "appendfsync")
    settings = [f"{name}={(await connection.call('CONFIG', 'GET', name))[1].decode()}" for name in names]
    return f"{', '.join(settings)}; acknowledged after the shared call"


async def _versions(connection: BareConnection) -> dict[str, str]:
    info = await _info(connection, "server")
    name = "valkey" if "valkey_version" in info else "redis"
    return {name: info[f"{name}_version"], "libvalkey": version("libvalkey")}


async def _cpu_s(primaries: Sequence[BareConnection]) -> float:
    """Return the seconds of CPU that these servers have used, with all their threads."""
    infos = [await _info(primary, "cpu") for primary in primaries]
    return sum(float(info[f"used_cpu_{mode}"]) for info in infos for mode in ("user", "sys"))


async def _info(connection: BareConnection, section: str) -> dict[str, str]:
    return dict(line.partition(":")[::2] for line in (await connection.call("INFO", section)).decode().splitlines())
