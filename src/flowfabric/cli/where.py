"""Filters of executions on the command line: options, and `--where` with several of them in one text."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI

# By the word of `--where`: the filter of a search.
KEYS = {
    "state": "public_state",
    "task": "kind",
    "lane": "lane_id",
    "namespace": "namespace",
    "tag": "tag",
    "flow": "flow_id",
    "parent": "parent_id",
    "worker": "worker_instance_id",
    "error": "error",
    "since": "created_from",
    "before": "created_before",
}
HELP = "As in 'state=failed task=mail since=2h': " + ", ".join(KEYS) + "."
WhereOption = Annotated[list[str] | None, typer.Option("--where", metavar="KEY=VALUE …", help=HELP)]


async def parse_filters(engine: EngineAPI, where: list[str] | None, **options: str | None) -> dict[str, Any]:
    """Return the filters of a search: options by their word, and those of `--where`; one may be given once."""
    given = {word: value for word, value in options.items() if value is not None}
    for text in where or ():
        for part in _split(text):
            word, separator, value = part.partition("=")
            if not separator or word not in KEYS:
                raise typer.BadParameter(
                    f"{part!r}: not KEY=VALUE with a key of {', '.join(KEYS)}", param_hint="--where"
                )
            if word in given:
                raise typer.BadParameter(f"{word} is given twice", param_hint="--where")
            given[word] = value
    return {KEYS[word]: await _value(engine, word, text) for word, text in given.items()}


def parse_tag(text: str, option: str) -> tuple[str, str]:
    """Parse a `key=value` tag of the command line."""
    key, separator, value = text.partition("=")
    if not separator:
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint=option)
    return key, value


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as fault:
        raise typer.BadParameter(str(fault), param_hint="--where") from None


async def _value(engine: EngineAPI, word: str, text: str) -> Any:
    match word:
        case "state":
            return tuple(text.split(","))
        case "tag":
            return parse_tag(text, "--tag")
        case "since" | "before":
            return await _instant(engine, word, text)
        case _:
            return text


async def _instant(engine: EngineAPI, word: str, text: str) -> int:
    """Return an instant: a length of time before the store's now, or an ISO date and time."""
    from datetime import datetime

    from flowfabric.sdk.durations import to_ms

    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return await engine.ping() - to_ms(text, word)
    return int(at.timestamp() * 1000)
