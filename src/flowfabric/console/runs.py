"""The list of runs, newest first, with filters that are part of the URL, and what operators may do with runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import parse_qs

import msgspec

from flowfabric import errors, ids
from flowfabric.console.pages import PAGE_SIZE, Ui, View, action, page, parse_integer, parse_json, wants_json
from flowfabric.engine.operations.pages import ExecutionListPage
from flowfabric.engine.types import ExecutionListing, MessageArgs
from flowfabric.model.answers.execution import NothingToDo
from flowfabric.model.gate import Fact
from flowfabric.model.security.api_token import ApiScope
from flowfabric.model.states import PublicState
from flowfabric.model.text import first_line, humanize
from flowfabric.server.errors import bad_request

FILTER_NAMES = ("task", "state", "lane", "namespace", "tag", "flow", "error", "since", "worker")
STATE_CHOICES = tuple(state.value for state in PublicState if state is not PublicState.RESUMABLE)
SINCE_CHOICES = (("5m", "5 minutes"), ("1h", "hour"), ("24h", "day"), ("7d", "week"))
MAX_WHY_CHARS = 160
_UNITS = {"m": 60_000, "h": 3_600_000, "d": 86_400_000}


class RunRow(msgspec.Struct, frozen=True):
    """A run in a list."""

    execution_id: str
    task: str
    state: PublicState
    lane: str
    namespace: str
    attempts: int
    created_at: int
    took_ms: int | None
    why: str
    until: int | None = None  # the instant at which its wait ends anyway
    why_until: str = ""


class FactRow(msgspec.Struct, frozen=True):
    """A value that a run shows under a name."""

    name: str
    value: str
    number: int  # how often it was set
    set_at: int


def fact_row(ui: Ui, fact: Fact) -> FactRow:
    """Return a fact, its value redacted like every payload."""
    return FactRow(fact.name, ui.payload_text("fact", fact.value), fact.number, fact.set_at)


class Filters(msgspec.Struct, frozen=True):
    """Filters of a list of runs; an empty one restricts nothing."""

    task: str = ""
    state: str = ""
    lane: str = ""
    namespace: str = ""
    tag: str = ""
    flow: str = ""
    error: str = ""
    since: str = ""
    worker: str = ""

    @property
    def as_query(self) -> dict[str, str]:
        """The filters as parameters of a URL."""
        return dict(self.chips)

    @property
    def chips(self) -> list[tuple[str, str]]:
        """The filters that are set."""
        return [(name, value) for name in FILTER_NAMES if (value := getattr(self, name))]


class RunsPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "runs.html"
    filters: Filters
    runs: list[RunRow]
    next_cursor: str | None
    incomplete: bool
    states: tuple[str, ...] = STATE_CHOICES
    since_choices: tuple[tuple[str, str], ...] = SINCE_CHOICES


def read_filters(ui: Ui) -> Filters:
    """Read the filters of the URL; a caller that is bound to namespaces gets one of them."""
    given = {name: (ui.request.query_param(name) or "").strip() for name in FILTER_NAMES}
    given["namespace"] = ui.given_namespace or ""
    if given["state"] not in ("", *STATE_CHOICES):
        raise bad_request(f"state: {given['state'][:40]!r} is not one of {', '.join(STATE_CHOICES)}")
    if given["tag"] and "=" not in given["tag"]:
        raise bad_request("tag: not key=value")
    return Filters(**given)


def since_ms(text: str) -> int | None:
    """Parse `90s`-like ages: 5m, 1h, 7d."""
    if not text:
        return None
    number, unit = text[:-1], text[-1:]
    if not number.isascii() or not number.isdecimal() or len(number) > 6 or unit not in _UNITS:
        raise bad_request(f"since: {text[:20]!r} is no age such as 5m, 1h or 7d")
    return int(number) * _UNITS[unit]


async def search(ui: Ui, filters: Filters, cursor: str | None, limit: int) -> ExecutionListPage:
    """Return a page of runs, newest first, within the namespaces of the caller."""
    return await ui.engine.search_executions(**await search_arguments(ui, filters), cursor=cursor, limit=limit)


async def search_arguments(ui: Ui, filters: Filters) -> dict[str, Any]:
    """Return the filters as arguments of a search or of a bulk operation."""
    age = since_ms(filters.since)
    key, _, value = filters.tag.partition("=")
    return {
        "namespace": filters.namespace or None,
        "namespaces": ui.namespaces,
        "kind": filters.task or None,
        "public_state": filters.state or None,
        "lane_id": filters.lane or None,
        "flow_id": filters.flow or None,
        "worker_instance_id": filters.worker or None,
        "error": filters.error or None,
        "tag": (key, value) if filters.tag else None,
        "created_from": None if age is None else max(0, await ui.engine.ping() - age),
    }


def run_row(run: ExecutionListing) -> RunRow:
    """Return a run as lists show it."""
    is_ended = run.ended_at is not None
    why = run.reason or "" if is_ended else run.blocking_detail or humanize(run.blocking_reason or "")
    until = run.delay_until if run.public_state is PublicState.DELAYED else None
    if run.public_state is PublicState.ACTIVE:
        why = run.worker_instance_id or ""
    elif until is not None:
        why = run.reason or ""
    return RunRow(
        run.execution_id,
        run.execution_kind,
        run.public_state,
        run.lane_id,
        run.namespace,
        run.total_attempt_count,
        run.created_at,
        run.ended_at - run.created_at if run.ended_at is not None else None,
        first_line(why)[:MAX_WHY_CHARS],
        until,
        "tried again" if run.reason else "starts",
    )


@page("/runs", rows="runs")
async def show_runs(ui: Ui) -> RunsPage:
    """List runs, newest first."""
    filters = read_filters(ui)
    cursor = ui.request.cursor
    found = await search(ui, filters, cursor, PAGE_SIZE)
    return RunsPage(
        title="Runs",
        about="" if cursor else "runs",
        filters=filters,
        runs=[run_row(run) for run in found.executions],
        next_cursor=found.next_cursor,
        incomplete=found.incomplete,
    )


class FoundPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "found.html"
    query: str
    matches: list[str]
    more: bool


@page("/find")
async def find_run(ui: Ui) -> FoundPage | str:
    """Find runs by the beginning of their id; a single one is opened."""
    query = (ui.request.query_param("q") or "").strip()
    matches, more = [], False
    if query:
        try:
            found = await ui.engine.find_executions(query, namespaces=ui.namespaces, limit=20)
            matches, more = found.execution_ids, found.more
        except errors.ValidationError:
            pass
    if len(matches) == 1 and not wants_json(ui.request):
        return ui.url(f"/runs/{matches[0]}")
    return FoundPage(title="Find", query=query, matches=matches, more=more)


@action("/runs/selected", scope=ApiScope.OPERATE)
async def act_on_selected(ui: Ui, fields: Mapping[str, str]) -> str:
    """Cancel or replay the runs that were ticked; those whose state does not allow it are left as they are."""
    chosen = parse_qs(ui.request.body.decode()).get("id", [])[:PAGE_SIZE]
    verb = fields.get("verb", "")
    done = 0
    for text in chosen:
        execution_id = ids.parse_execution_id(text)
        await ui.request.require_execution_access(execution_id)
        try:
            if verb == "replay":
                await ui.engine.replay_execution(execution_id)
            elif verb == "cancel":
                await ui.engine.cancel_execution(execution_id, reason=fields.get("reason") or f"by {ui.name}")
            else:
                raise bad_request("verb: neither cancel nor replay")
            done += 1
        except (errors.StateError, errors.ContentionError):
            continue
    return ui.url("/runs", done="cancelled" if verb == "cancel" and done else "replayed" if done else "nothing")


# ---------------------------------------------------------------------------------------------------------------
# Actions on one run


@action("/runs/{id}/cancel", scope=ApiScope.OPERATE)
async def cancel_run(ui: Ui, fields: Mapping[str, str]) -> str:
    """Cancel a run."""
    execution_id = await ui.execution_id()
    await ui.engine.cancel_execution(execution_id, reason=fields.get("reason") or f"cancelled by {ui.name}")
    return ui.url(f"/runs/{execution_id}", done="cancelled")


@action("/runs/{id}/replay", scope=ApiScope.OPERATE)
async def replay_run(ui: Ui, fields: Mapping[str, str]) -> str:
    """Start another life of an ended run."""
    execution_id = await ui.execution_id()
    await ui.engine.replay_execution(execution_id)
    return ui.url(f"/runs/{execution_id}", done="replayed")


@action("/runs/{id}/revoke", scope=ApiScope.OPERATE)
async def revoke_lease_of_run(ui: Ui, fields: Mapping[str, str]) -> str:
    """Take a run from its worker; another one continues it."""
    execution_id = await ui.execution_id()
    answer = await ui.engine.revoke_lease(execution_id, reason=fields.get("reason") or f"by {ui.name}")
    return ui.url(f"/runs/{execution_id}", done="nothing" if isinstance(answer, NothingToDo) else "revoked")


@action("/runs/{id}/priority", scope=ApiScope.OPERATE)
async def change_priority_of_run(ui: Ui, fields: Mapping[str, str]) -> str:
    """Change the priority of a run."""
    execution_id = await ui.execution_id()
    await ui.engine.change_priority(execution_id, parse_integer("priority", fields.get("priority", "")))
    return ui.url(f"/runs/{execution_id}", done="priority")


@action("/runs/{id}/tags", scope=ApiScope.OPERATE)
async def set_tag_of_run(ui: Ui, fields: Mapping[str, str]) -> str:
    """Set one tag of a run."""
    execution_id = await ui.execution_id()
    await ui.engine.set_execution_tag(execution_id, fields.get("key", "").strip(), fields.get("value", ""))
    return ui.url(f"/runs/{execution_id}", done="tagged")


@action("/runs/{id}/message", scope=ApiScope.SUBMIT)
async def send_message_to_run(ui: Ui, fields: Mapping[str, str]) -> str:
    """Send a message to a mailbox of a run; the same form sent twice is one message."""
    execution_id, once = await ui.execution_id(), fields.get("once", "")
    message_id = ids.parse_uuid(once, "once") if once else ui.new_id()
    await ui.engine.send_message(
        MessageArgs(
            execution_id=execution_id,
            mailbox=fields.get("mailbox", "").strip(),
            message_id=message_id,
            payload=parse_json("value", fields.get("value", "")),
            payload_encoding="json",
            sender=ui.name,
            idempotency_key=message_id,
        )
    )
    return ui.url(f"/runs/{execution_id}", done="sent")
