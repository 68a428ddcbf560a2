"""Resolve ids that are typed in full or as a unique prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI

MAX_CANDIDATES = 10
UUID_DIGITS = 32


async def resolve_execution_id(engine: EngineAPI, text: str) -> str:
    """Return the execution id for an id or a unique prefix; an ambiguous prefix is refused with the first matches."""
    from flowfabric.errors import InvalidInput, NotFound
    from flowfabric.ids import parse_execution_id

    try:
        return parse_execution_id(text)
    except InvalidInput:
        matches = await engine.find_executions(text, limit=MAX_CANDIDATES)
    if not matches.execution_ids:
        raise NotFound("execution", f"no id begins with {text!r}")
    if len(matches.execution_ids) == 1 and not matches.more:
        return matches.execution_ids[0]
    kinds = await engine.read_kinds(matches.execution_ids)
    candidates = [f"{one}  {kinds.get(one, '')}" for one in matches.execution_ids]
    raise _ambiguous("execution_id", text, [*candidates, *(["and others"] if matches.more else [])])


async def resolve_budget_id(engine: EngineAPI, text: str, namespace: str) -> str:
    """Return the budget id of a namespace for an id or a unique prefix."""
    from uuid import UUID

    from flowfabric.errors import NotFound
    from flowfabric.ids import InvalidUuid, parse_uuid

    try:
        return parse_uuid(text, "budget_id")
    except InvalidUuid:
        digits = text.replace("-", "").lower()
        if not digits or len(digits) >= UUID_DIGITS or not set(digits) <= set("0123456789abcdef"):
            raise
    first = int(digits.ljust(UUID_DIGITS, "0"), 16)  # lists begin after their cursor
    cursor = str(UUID(int=first - 1)) if first else None
    listed = await engine.list_budgets(cursor=cursor, limit=MAX_CANDIDATES, namespace=namespace)
    found = [one for one in listed if one.replace("-", "").startswith(digits)]
    if not found:
        raise NotFound("budget", f"no id begins with {text!r}")
    if len(found) > 1:
        raise _ambiguous("budget_id", text, found)
    return found[0]


def _ambiguous(field: str, text: str, candidates: list[str]) -> Exception:
    from flowfabric.errors import InvalidInput

    listed = "\n".join(f"  {one.rstrip()}" for one in candidates)
    return InvalidInput(f"{field}: more than one begins with {text!r}; give more of it:\n{listed}")
