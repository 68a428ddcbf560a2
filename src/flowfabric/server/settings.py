"""Settings of the server, from the environment or from code."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from flowfabric.errors import InvalidInput
from flowfabric.ids import PartitionCounts, parse_lane_id
from flowfabric.server.logging import logger
from flowfabric.settings import FEED_RETENTION_MS, Secret, Settings, Sweeps

T = TypeVar("T")

Redact = Callable[[str, bytes], bytes]  # the kind of a payload and its bytes; returns what may be shown

DEFAULT_ADDRESS = "127.0.0.1:9090"
KEY_GRACE_MS = 24 * 60 * 60 * 1000
_LEVELS = {"trace": "debug", "warn": "warning", "off": "critical"}


class ConfigError(InvalidInput):
    """The server cannot start with these settings."""

    def __str__(self) -> str:
        return self.detail


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the server; durations are milliseconds, 0 is none."""

    host: str = "127.0.0.1"
    port: int = 9090
    api_token: Secret | None = None
    previous_api_token: Secret | None = None  # still accepted during a rotation
    allow_unauthenticated: bool = False
    public_url: str | None = None  # base URL of links for people
    allowed_hosts: tuple[str, ...] = ()  # further host names of a server without a token; "*" is any
    cors_origins: tuple[str, ...] = ()  # "*" is any
    waitpoint_secret: Secret | None = None
    waitpoint_grace_ms: int = KEY_GRACE_MS
    lanes: tuple[str, ...] = ("default",)  # only validated: a lane exists from its first execution
    run_sweeps: bool = True
    serve_metrics: bool = True
    serve_console: bool = True
    hide_payloads: bool = False  # the console shows sizes instead of inputs, results and outputs
    request_timeout_ms: int = 0
    rate_limit: float = 0.0  # requests a second for each token, and for each address without one
    max_connections: int = 1000
    max_feeds: int = 100  # live streams at a time for each token
    shutdown_grace_ms: int = 15_000
    log: str = "info"
    log_format: str = "auto"  # json, plain, or auto: plain on a terminal
    engine: Settings = Settings()

    @property
    def is_open(self) -> bool:
        """True if no token is required."""
        return self.api_token is None

    def check(self) -> None:
        """Raise ConfigError for a server without a token on a public address, unless that is allowed."""
        if self.is_open and not self.allow_unauthenticated and not is_loopback(self.host):
            raise ConfigError(
                f"refusing to listen on {self.host} without a token: set FF_API_TOKEN, or say --allow-unauthenticated"
            )


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a host."""
    return host == "localhost" or host == "::1" or bool(re.fullmatch(r"127(?:\.\d{1,3}){3}", host))


def from_environment(environ: Mapping[str, str] = os.environ) -> ServerSettings:
    """Read the settings from the environment; ConfigError names an invalid variable."""
    read = _Environment(environ)
    read.number("FF_SQLITE_POOL_SIZE", 4, minimum=1)  # has no effect here, but is validated
    host, port = parse_address(environ.get("FF_LISTEN_ADDR") or DEFAULT_ADDRESS)
    return ServerSettings(
        host=host,
        port=port,
        api_token=read.secret("FF_API_TOKEN"),
        previous_api_token=read.secret("FF_API_TOKEN_PREVIOUS"),
        allow_unauthenticated=read.flag("FF_ALLOW_UNAUTHENTICATED"),
        public_url=environ.get("FF_PUBLIC_URL") or None,
        allowed_hosts=read.names("FF_ALLOWED_HOSTS"),
        cors_origins=read.origins("FF_CORS_ORIGINS"),
        waitpoint_secret=read.hex_secret("FF_WAITPOINT_HMAC_SECRET"),
        waitpoint_grace_ms=read.number("FF_WAITPOINT_HMAC_GRACE_MS", KEY_GRACE_MS),
        lanes=read.lanes("FF_LANES"),
        run_sweeps=not read.flag("FF_NO_SWEEPS"),
        serve_metrics=not read.flag("FF_NO_METRICS"),
        serve_console=not read.flag("FF_NO_UI"),
        hide_payloads=read.flag("FF_UI_HIDE_PAYLOADS"),
        request_timeout_ms=read.number("FF_REQUEST_TIMEOUT_MS", 0),
        rate_limit=read.value("FF_RATE_LIMIT", 0.0, _decimal),
        max_connections=read.number("FF_MAX_CONNECTIONS", 1000),
        max_feeds=read.number("FF_MAX_FEEDS", 100),
        log=_log_level(environ),
        log_format=read.choice("FF_LOG_FORMAT", "auto", "json", "plain"),
        engine=Settings(
            partitions=PartitionCounts(
                read.number("FF_FLOW_PARTITIONS", 256, minimum=1, maximum=65_535),
                read.number("FF_BUDGET_PARTITIONS", 32, minimum=1, maximum=65_535),
                read.number("FF_QUOTA_PARTITIONS", 32, minimum=1, maximum=65_535),
            ),
            max_concurrent_stream_ops=read.number(
                "FF_MAX_CONCURRENT_STREAM_OPS", read.number("FF_MAX_CONCURRENT_TAIL", 64, minimum=1), minimum=1
            ),
            ageing_ms=read.by_lane("FF_LANE_AGEING_MS"),
            sweeps=read.sweeps(),
            feed_retention_ms=read.number("FF_FEED_RETENTION_MS", FEED_RETENTION_MS),
            postgres_pool_size=read.number("FF_POSTGRES_POOL_SIZE", 0, minimum=1) or None,
        ),
    )


def parse_address(text: str) -> tuple[str, int]:
    """Parse `host:port` or `[v6]:port`."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"invalid value for FF_LISTEN_ADDR: {text!r} is not host:port")
    return host.strip("[]"), int(port)


class _Environment:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def value(self, name: str, default: T, parse: Callable[[str], T]) -> T:
        text = self._environ.get(name)
        if text is None:
            return default
        try:
            return parse(text.strip())
        except ValueError as fault:
            raise ConfigError(f"invalid value for {name}: {fault}") from None

    def number(self, name: str, default: int, *, minimum: int = 0, maximum: int = 2**53 - 1) -> int:
        def parse(text: str) -> int:
            if not text.isdecimal():
                raise ValueError(f"{text!r} is not a whole number")
            if not minimum <= int(text) <= maximum:
                raise ValueError(f"{text} is not within {minimum}..{maximum}")
            return int(text)

        return self.value(name, default, parse)

    def choice(self, name: str, default: str, *others: str) -> str:
        def parse(text: str) -> str:
            if text not in (default, *others):
                raise ValueError(f"{text!r} is not one of {', '.join((default, *others))}")
            return text

        return self.value(name, default, parse)

    def flag(self, name: str) -> bool:
        return self._environ.get(name, "").strip().lower() in ("1", "true")

    def secret(self, name: str) -> Secret | None:
        text = self._environ.get(name)
        return Secret(text) if text else None

    def hex_secret(self, name: str) -> Secret | None:
        text = self._environ.get(name)
        if text is None:
            return None
        if not re.fullmatch(r"(?:[0-9a-fA-F]{2})+", text):  # not shown: it may be almost right
            raise ConfigError(f"invalid value for {name}: must be a non-empty even-length hex string")
        return Secret(text)

    def origins(self, name: str) -> tuple[str, ...]:
        text = self._environ.get(name)
        if text is None:
            return ()
        values = [one.strip() for one in text.split(",") if one.strip()]
        origins = tuple(one for one in values if one == "*" or re.fullmatch(r"https?://[^\s/,]+", one))
        if not origins:
            raise ConfigError(f"invalid value for {name}: no usable origin in it")
        for invalid in (one for one in values if one not in origins):
            logger.warning("%s: %r is not an origin and is ignored", name, invalid)
        return origins

    def names(self, name: str) -> tuple[str, ...]:
        return tuple(one.strip() for one in self._environ.get(name, "").split(",") if one.strip())

    def lanes(self, name: str) -> tuple[str, ...]:
        def parse(text: str) -> tuple[str, ...]:
            lanes = tuple(one.strip() for one in text.split(",") if one.strip())
            if not lanes:
                raise ValueError("at least one lane is needed")
            try:
                return tuple(dict.fromkeys(parse_lane_id(one) for one in lanes))
            except InvalidInput as fault:
                raise ValueError(fault.detail) from None

        return self.value(name, ("default",), parse)

    def by_lane(self, name: str) -> dict[str, int]:
        """Parse a number per lane, as in `bulk=60000,mail=1000`."""

        def parse(text: str) -> dict[str, int]:
            numbers: dict[str, int] = {}
            for one in (part.strip() for part in text.split(",") if part.strip()):
                lane, _, number = one.rpartition("=")
                if not lane or not number.isdecimal():
                    raise ValueError(f"{one!r} is not lane=milliseconds")
                numbers[lane] = int(number)
            return numbers

        return self.value(name, {}, parse)

    def sweeps(self) -> Sweeps:
        """Read the sweep intervals, as FF_LEASE_EXPIRY_INTERVAL_MS or, with decimals, FF_LEASE_EXPIRY_INTERVAL_S."""
        values: dict[str, Any] = {}
        for field in Sweeps.__struct_fields__:
            if not field.endswith("_ms"):
                continue
            stem = f"FF_{field[:-3].upper()}_INTERVAL"
            seconds = self.value(f"{stem}_S", None, _seconds)
            ms = self.number(f"{stem}_MS", 0 if seconds is None else seconds)
            if f"{stem}_MS" in self._environ or seconds is not None:
                values[field] = ms
        return Sweeps(**values)


def _seconds(text: str) -> int | None:
    return round(_decimal(text, "a number of seconds") * 1000)


def _decimal(text: str, what: str = "a number") -> float:
    if not re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", text):
        raise ValueError(f"{text!r} is not {what}")
    return float(text)


def _log_level(environ: Mapping[str, str]) -> str:
    """Return the level of FF_LOG, or the first level in RUST_LOG (debug if it names none)."""
    name = "FF_LOG" if environ.get("FF_LOG") else "RUST_LOG"
    text = environ.get(name) or "info"
    found = re.search(r"\b(trace|debug|info|warn|warning|error|off)\b", text.lower())
    if found is None:
        if name == "RUST_LOG":
            return "debug"
        raise ConfigError(f"invalid value for FF_LOG: {text!r} names no level")
    return _LEVELS.get(found[1], found[1])
