"""Logs: one JSON object a line, ids as fields, no token and no secret in any of them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

logger = logging.getLogger("flowfabric.server")
audit = logging.getLogger("flowfabric.audit")

_encode = msgspec.json.Encoder(enc_hook=repr).encode


class JsonLines(logging.Formatter):
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


def log_to_stderr(level: str) -> None:
    """Let every log of this process go to stderr, a line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def note_request(method: str, path: str, status: int, seconds: float, request_id: str, who: str) -> None:
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


def note_audit(event: str, facts: Mapping[str, object]) -> None:
    """An operator did something."""
    audit.info(event, extra={"fields": dict(facts)})
