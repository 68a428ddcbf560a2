"""Logging as JSON lines or plain lines. No log contains a token or a secret."""

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
    """Formats a record as a line of JSON, with `fields` of the record beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "target": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return _encode(entry).decode()


class PlainFormatter(logging.Formatter):
    """Formats a record for people: time, level, message and fields."""

    default_time_format = "%H:%M:%S"
    default_msec_format = None

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        line = f"{self.formatTime(record)} {record.levelname.lower():<7} {record.getMessage()}"
        entry = f"{line}  {fields}" if fields else line
        return f"{entry}\n{self.formatException(record.exc_info)}" if record.exc_info else entry


def log_to_stderr(level: str, form: str = "auto") -> None:
    """Send all logs of this process to stderr as `json` or `plain` lines; `auto` is plain on a terminal."""
    plain = sys.stderr.isatty() if form == "auto" else form == "plain"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter() if plain else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def log_request(method: str, path: str, status: int, seconds: float, request_id: str, who: str) -> None:
    """Log a request: at ERROR from 500, at INFO from 400, else at DEBUG."""
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
    """Log an action of an operator."""
    audit_logger.info(event, extra={"fields": dict(facts)})
