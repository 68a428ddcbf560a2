"""URLs of the Valkey store.

    valkey://user:password@host:6379/0          one server; the path is the number of the database
    valkeys://host:6379                         the same with TLS, as is ?tls=1
    valkey+cluster://host-a:6379,host-b:6379    a cluster; any of its nodes are enough to find the others
    redis://…, rediss://…, redis+cluster://…    the same for Redis 7 and newer

Options:

    wait=N                       a write is acknowledged once N replicas have it (WAIT); 0 by default
    durability=server|fsync      fsync: once the server has also written it to disk (WAITAOF); else as it is configured
    tls=1, tls_ca=FILE, tls_cert=FILE, tls_key=FILE
    connect_timeout=S, command_timeout=S
"""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from flowfabric.errors import InvalidInput
from flowfabric.settings import Deadlines, Secret

DEFAULT_PORT = 6379
SCHEMES = {  # True for a cluster, True for TLS
    "valkey": (False, False),
    "valkeys": (False, True),
    "valkey+cluster": (True, False),
    "valkeys+cluster": (True, True),
    "redis": (False, False),
    "rediss": (False, True),
    "redis+cluster": (True, False),
    "rediss+cluster": (True, True),
}
_OPTIONS = ("wait", "durability", "tls", "tls_ca", "tls_cert", "tls_key", "connect_timeout", "command_timeout")


class ValkeyAddress(msgspec.Struct, frozen=True, kw_only=True):
    """What a URL of the Valkey store says."""

    hosts: tuple[tuple[str, int], ...]
    is_cluster: bool = False
    username: str | None = None
    password: Secret | None = None
    database: int = 0
    has_tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    wait: int = 0  # replicas that have a write before it is acknowledged
    fsync: bool = False  # the server's disk has it, too
    connect_s: float | None = None
    command_s: float | None = None

    def deadlines(self, default: Deadlines) -> Deadlines:
        """Return the deadlines with those that the URL sets."""
        named = {"connect_s": self.connect_s, "command_s": self.command_s}
        return msgspec.structs.replace(default, **{name: value for name, value in named.items() if value is not None})

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the settings of TLS; `InvalidInput` if a file cannot be used."""
        if not self.has_tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca)
            if self.tls_cert is not None:
                context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(file for file in (self.tls_ca, self.tls_cert, self.tls_key) if file)
            raise InvalidInput(f"url: {files} cannot be used for TLS: {error}") from error
        return context


def parse_url(url: str) -> ValkeyAddress:
    """Return what a URL says; `InvalidInput` names what is wrong and what to write instead."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise InvalidInput(f"url: {parts.scheme!r} is no scheme of Valkey; write valkey:// or valkey+cluster://")
    is_cluster, has_tls = SCHEMES[parts.scheme]
    user_info, _, location = parts.netloc.rpartition("@")
    username, _, password = user_info.partition(":")
    options = _options(parts.query)
    hosts = tuple(_host(text, is_cluster=is_cluster) for text in location.split(","))
    if len(hosts) > 1 and not is_cluster:
        raise InvalidInput("url: several hosts are a cluster; write valkey+cluster://a:6379,b:6379")
    if username and not password:
        raise InvalidInput(
            "url: a user needs a password; write valkey://user:password@host, or valkey://:password@host"
        )
    has_tls = has_tls or _choice(options, "tls", {"1": True, "0": False}, default=False)
    files = {name: _file(options, name) for name in ("tls_ca", "tls_cert", "tls_key")}
    if not has_tls and (named := [name for name, file in files.items() if file]):
        raise InvalidInput(f"url: {named[0]} needs TLS; write valkeys://… or add tls=1")
    if files["tls_key"] and not files["tls_cert"]:
        raise InvalidInput("url: tls_key needs tls_cert, the certificate that belongs to it")
    return ValkeyAddress(
        hosts=hosts,
        is_cluster=is_cluster,
        username=unquote(username) or None,
        password=Secret(unquote(password)) if password else None,
        database=_database(parts.path),
        has_tls=has_tls,
        **files,
        wait=_whole_number(options, "wait", most=16),
        fsync=_choice(options, "durability", {"server": False, "fsync": True}, default=False),
        connect_s=_seconds(options, "connect_timeout"),
        command_s=_seconds(options, "command_timeout"),
    )


def _options(query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise InvalidInput(f"url: {unknown[0]!r} is no option of Valkey's; there are {', '.join(_OPTIONS)}")
    return options


def _host(text: str, *, is_cluster: bool) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port == 0:
        example = "valkey+cluster://a:6379,b:6379" if is_cluster else "valkey://host:6379/0"
        raise InvalidInput(f"url: {text!r} is no host and port; write {example}")
    return host, port or DEFAULT_PORT


def _database(path: str) -> int:
    text = path.strip("/")
    if text and not (text.isascii() and text.isdigit() and len(text) < 6):
        raise InvalidInput(f"url: the path is the number of a database, as in valkey://host:6379/0, not {path!r}")
    return int(text or 0)


def _choice(options: dict[str, str], name: str, values: dict[str, bool], *, default: bool) -> bool:
    text = options.get(name)
    if text is not None and text not in values:
        raise InvalidInput(f"url: {name} is {' or '.join(values)}, not {text!r}")
    return default if text is None else values[text]


def _whole_number(options: dict[str, str], name: str, *, most: int) -> int:
    text = options.get(name, "0")
    if not (text.isascii() and text.isdigit() and int(text) <= most):
        raise InvalidInput(f"url: {name} is a whole number from 0 to {most}, not {text!r}")
    return int(text)


def _seconds(options: dict[str, str], name: str) -> float | None:
    text = options.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e6:
        raise InvalidInput(f"url: {name} is a number of seconds of at most 1000000, not {text!r}")
    return value


def _file(options: dict[str, str], name: str) -> str | None:
    text = options.get(name)
    if text is not None and not Path(text).is_file():
        raise InvalidInput(f"url: {name} names {text!r}, which is no file")
    return text
