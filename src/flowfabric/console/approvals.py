"""The inbox of approvals: each question with its answers so far, and a typed form to answer it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec

from flowfabric import errors, ids
from flowfabric.console import show
from flowfabric.console.pages import Ui, View, action, page
from flowfabric.engine.types import Approval, DuplicateDelivery, SignalArgs, vote_schema
from flowfabric.model.security.api_token import ApiScope
from flowfabric.model.text import join_some, pluralize
from flowfabric.server import approval_form

MAX_READ = 200  # suspended runs for a page; most ask nobody
MAX_FACT_CHARS = 2000
MAX_NAME_CHARS = 100
SATISFIED = "resume_condition_satisfied"
YES_OR_NO: dict[str, Any] = {"type": "boolean", "title": "Approve?"}


class Question(msgspec.Struct, frozen=True):
    """An open approval as the inbox shows it."""

    execution_id: str
    task: str
    name: str
    facts: list[tuple[str, str]]
    need: int
    asked: int
    votes: list[tuple[str, int, str]]  # voter, instant, value
    free_waitpoint: str | None  # the first place without an answer
    opened_at: int
    expires_at: int | None
    schema: dict[str, Any]

    @property
    def answers(self) -> int:
        return len(self.votes)

    @property
    def form(self) -> approval_form.RenderedForm:
        """The typed form; every foreign text in it is escaped."""
        return approval_form.render_form(self.schema)


class ApprovalsPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "approvals.html"
    approvals: list[Question]
    next_cursor: str | None = None
    error: str = ""
    error_about: str = ""


@page("/approvals")
async def show_approvals(ui: Ui) -> ApprovalsPage:
    """List what waits for people, the first to time out first."""
    return await _inbox(ui)


async def _inbox(ui: Ui) -> ApprovalsPage:
    found = await ui.engine.list_approvals(
        namespace=ui.given_namespace,
        namespaces=ui.namespaces,
        cursor=ui.request.cursor,
        limit=MAX_READ,
    )
    questions = [_question(ui, approval) for approval in found.approvals]
    return ApprovalsPage(title="Approvals", about="approvals", approvals=questions, next_cursor=found.next_cursor)


async def open_approvals(ui: Ui) -> list[Question]:
    """Return the first open approvals that the caller may see."""
    found = await ui.engine.list_approvals(namespaces=ui.namespaces, limit=MAX_READ)
    return [_question(ui, approval) for approval in found.approvals]


def _question(ui: Ui, approval: Approval) -> Question:
    return Question(
        execution_id=approval.execution_id,
        task=approval.execution_kind,
        name=approval.name.replace("_", " "),
        facts=_facts(ui, approval.shown),
        need=approval.need,
        asked=len(approval.approvers),
        votes=[
            (vote.by or "unknown", vote.at, ui.payload_text("vote", vote.payload, MAX_FACT_CHARS))
            for vote in approval.votes
        ],
        free_waitpoint=next((each.waitpoint_id for each in approval.approvers if not each.has_voted), None),
        opened_at=approval.opened_at,
        expires_at=approval.expires_at,
        schema=approval.schema or YES_OR_NO,
    )


def describe_answers(approval: Approval) -> str:
    """Return how many answers an approval has, from whom, and how many it needs."""
    votes, asked = len(approval.votes), pluralize(len(approval.approvers), "person is", "people are")
    given = f" ({join_some([vote.by or 'unknown' for vote in approval.votes])})" if votes else ""
    return f"{approval.name.replace('_', ' ')}: {votes} of {approval.need} answers{given}; {asked} asked"


def _facts(ui: Ui, facts: Any) -> list[tuple[str, str]]:
    """Return what the question shows, as names and texts."""
    if facts is None:
        return []
    app = ui.request.app
    if app.settings.hide_payloads:
        return [("facts", show.HIDDEN)]
    if app.redact is not None:
        redacted = app.redact("facts", msgspec.json.encode(facts))
        try:
            facts = msgspec.json.decode(redacted)
        except msgspec.DecodeError:
            facts = redacted.decode("utf-8", "replace")
    if not isinstance(facts, dict):
        return [("value", _fact(facts))]
    return [(show.visible(str(key)), _fact(value)) for key, value in facts.items()]


def _fact(value: object) -> str:
    return show.visible(value if isinstance(value, str) else msgspec.json.encode(value).decode())[:MAX_FACT_CHARS]


@action("/approvals/{id}/{waitpoint_id}", scope=ApiScope.SUBMIT)
async def vote(ui: Ui, fields: Mapping[str, str]) -> str | ApprovalsPage:
    """Answer an approval in the name of the session; the same form sent twice is one answer."""
    execution_id = await ui.execution_id()
    waitpoint_id = ids.parse_uuid(ui.request.path_params[1], "waitpoint_id")
    run, record = await asyncio.gather(
        ui.engine.describe_execution(execution_id), ui.engine.describe_waitpoint(execution_id, waitpoint_id)
    )
    if run is None or record is None:
        raise errors.NotFound("waitpoint")
    try:
        schema = vote_schema(run.tags, record.waitpoint_key) or YES_OR_NO
        payload = msgspec.json.encode(approval_form.parse_form(fields, schema))
        by = fields.get("by", "").strip()[:MAX_NAME_CHARS] if ui.is_open else ""
        return await _deliver(ui, execution_id, waitpoint_id, payload, fields.get("once", ""), by)
    except (approval_form.InvalidFormInput, errors.InvalidInput) as wrong:
        view = await _inbox(ui)
        words = wrong.detail if isinstance(wrong, errors.InvalidInput) else str(wrong)
        return msgspec.structs.replace(view, error=words, error_about=execution_id)


async def _deliver(ui: Ui, execution_id: str, waitpoint_id: str, payload: bytes, once: str, by: str) -> str:
    token = await ui.engine.read_token_of(execution_id, waitpoint_id)
    if token is None:
        return ui.url("/approvals", done="not-counted")
    signal_id = ids.parse_uuid(once, "once") if once else ui.engine.minter.uuid()
    answer = await ui.engine.deliver_signal(
        SignalArgs(
            execution_id=execution_id,
            waitpoint_id=waitpoint_id,
            signal_id=signal_id,
            signal_name="vote",
            signal_category="approval",
            source_type="console",
            source_identity=by or ui.name,
            waitpoint_token=token,
            payload=payload,
            payload_encoding="json",
            idempotency_key=signal_id,
        )
    )
    if isinstance(answer, DuplicateDelivery):
        return ui.url("/approvals", done="repeated")
    if not answer.is_useful:
        return ui.url("/approvals", done="not-counted")
    return ui.url("/approvals", done="complete" if answer.effect == SATISFIED else "voted")


class LinksPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "links.html"
    execution_id: str
    links: list[str]


@action("/approvals/{id}/links", scope=ApiScope.OPERATE)
async def show_links(ui: Ui, fields: Mapping[str, str]) -> LinksPage:
    """Show the signed links of the open waitpoints of a run; every call is audited."""
    execution_id = await ui.execution_id()
    open_waitpoints = await ui.engine.list_pending_waitpoints(execution_id, limit=100)
    base = ui.request.app.settings.public_url or ui.request.mount_path
    links = []
    for waitpoint in open_waitpoints.entries:
        token = await ui.engine.read_token_of(execution_id, waitpoint.waitpoint_id)
        if token is not None:
            path = f"/v1/waitpoints/{quote(execution_id, safe=':')}/{waitpoint.waitpoint_id}"
            links.append(f"{base.rstrip('/')}{path}?token={quote(token.reveal(), safe=':')}")
    return LinksPage(title="Links", execution_id=execution_id, links=links)
