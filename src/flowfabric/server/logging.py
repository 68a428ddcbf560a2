"""Logs: one JSON object a line for machines, one plain line for people; no token and no secret in any of them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

logger = logging.getLogger("flowfabric.server")
audit_logger = logging.getLogger("flowfabric.audit")

_encode = msgspec.json.Encoder(enc_hook=repr).encode


class JsonFormatter(logging.Formatter):
    """A record as a line; what a caller put into `fields` stands beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "target": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return _encode(told).decode()


class PlainFormatter(logging.Formatter):
    """A record for a person: the time, the level, what happened, and its fields."""

    default_time_format = "%H:%M:%S"
    default_msec_format = None

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        line = f"{self.formatTime(record)} {record.levelname.lower():<7} {record.getMessage()}"
        told = f"{line}  {fields}" if fields else line
        return f"{told}\n{self.formatException(record.exc_info)}" if record.exc_info else told


def log_to_stderr(level: str, form: str = "auto") -> None:
    """Let every log of this process go to stderr, a line each: as `json`, `plain`, or as suits whoever reads it."""
    plain = sys.stderr.isatty() if form == "auto" else form == "plain"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter() if plain else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def log_request(method: str, path: str, status: int, seconds: float, request_id: str, who: str) -> None:
    """A line about a request: the good ones only when somebody looks closely."""
    level = logging.ERROR if status >= 500 else logging.INFO if status >= 400 else logging.DEBUG
    if logger.isEnabledFor(level):
        fields = {
            "method": method,
            "path": path,
            "status": status,
            "ms": round(seconds * 1000, 2),
            "request_id": request_id,
            "who": who,
        }
        logger.log(level, "request", extra={"fields": fields})


def log_audit(event: str, facts: Mapping[str, object]) -> None:
    """An operator did something."""
    audit_logger.info(event, extra={"fields": dict(facts)})
