"""The approval page behind a signed link: shows the question and delivers the decision as a signal.

The token in the link is the only credential. A wrong link, a used one and one that never existed get the same response.
Programs post their decision to the link itself, as JSON, and get JSON back.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from html import escape
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from flowfabric import errors, ids, json_limits
from flowfabric.api.encoding import RedactedRepr
from flowfabric.engine.types import Accepted, DuplicateDelivery, SignalArgs, WaitpointToken, approval_name, vote_schema
from flowfabric.server import approval_form
from flowfabric.server.errors import HttpError, bad_request
from flowfabric.server.request import Request, encode, variant_response
from flowfabric.server.routing import HTML, SIGNAL_LIMIT, QueryParam, Response, RouteGroup, one_of

routes = RouteGroup("waitpoint pages")

PATH = "/v1/waitpoints/{id}/{waitpoint_id}"
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:40rem;margin:3rem auto;padding:0 1rem;color:#222}"
    "dl{display:grid;grid-template-columns:max-content 1fr;gap:.3rem 1rem}dt{color:#666}dd{margin:0}"
    "label{display:block;margin:.8rem 0}input,select,textarea{display:block;width:100%;font:inherit;padding:.4rem}"
    "button{font:inherit;padding:.5rem 1.5rem}.bad{color:#a00}"
)
_STYLE_HASH = b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
_FORM_POLICY = "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
SECURITY_HEADERS = (
    (
        "content-security-policy",
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; {_FORM_POLICY}",
    ),
    ("cache-control", "no-store"),
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
)
WAITPOINT_NOT_FOUND = "not found: waitpoint"
LINK_INVALID_TEXT = "This link is not good: it is wrong, it has been used, or the decision is over."
RECORDED_TEXT = "Thank you. Your decision was recorded."
ALREADY_VOTED_TEXT = "A decision was given with this link before. That one counts, and this one does not."
MAX_NAME_CHARS = 200


class ApprovalQuestion(RedactedRepr, msgspec.Struct, frozen=True):
    """The question behind a link: facts to show and the schema of the decision."""

    execution_id: str
    waitpoint_id: str
    token: str
    title: str
    shown: Any
    schema: dict[str, Any]


@routes.get(PATH, {200: HTML}, scope=None, query=(QueryParam("token", {"type": "string"}, required=True),))
async def show_waitpoint(request: Request[None]) -> Response:
    """Show the question and a form for the decision."""
    question = await _question(request, request.query_param("token") or "")
    return _page("Not found", f"<p>{LINK_INVALID_TEXT}</p>", 404) if question is None else _form(request, question)


@routes.post(
    PATH,
    {200: one_of(Accepted, DuplicateDelivery)},
    scope=None,
    body=bytes,
    limit=SIGNAL_LIMIT,
    query=(
        QueryParam("token", {"type": "string", "description": "the link's; the body is then the decision, as JSON"}),
        QueryParam("by", {"type": "string", "description": "who decides"}),
    ),
)
async def answer_waitpoint(request: Request[bytes]) -> Response:
    """Deliver a decision: from the form of the page, or JSON posted to the link itself."""
    token = request.query_param("token")
    return await _answer_form(request) if token is None else await _answer_json(request, token)


async def _answer_form(request: Request[bytes]) -> Response:
    try:
        fields = dict(
            parse_qsl(request.body.decode(), keep_blank_values=True, max_num_fields=2 * approval_form.MAX_FIELDS)
        )
    except ValueError:
        return _page("Not understood", "<p>The form could not be read.</p>", 400)
    question = await _question(request, fields.get("token", ""))
    if question is None:
        return _page("Not found", f"<p>{LINK_INVALID_TEXT}</p>", 404)
    try:
        decision = approval_form.parse_form(fields, question.schema)
    except approval_form.InvalidFormInput as invalid:
        return _form(request, question, str(invalid))
    idempotency_key = fields.get("once", "")
    try:
        signal_id = ids.parse_uuid(idempotency_key)
    except errors.InvalidInput:
        signal_id = request.engine.minter.uuid()
    try:
        answer = await request.engine.deliver_signal(
            _vote(
                (question.execution_id, question.waitpoint_id),
                question.token,
                signal_id=signal_id,
                by=fields.get("by", ""),
                payload=encode(decision),
                idempotency_key=signal_id,  # the same form sent twice is one vote
            )
        )
    except errors.InvalidInput as error:  # the decision does not fit the schema
        return _form(request, question, error.detail)
    except (errors.StateError, errors.ValidationError):
        return _page("Too late", f"<p>{LINK_INVALID_TEXT}</p>", 409)
    if isinstance(answer, DuplicateDelivery):
        return _page(question.title, f"<p>{RECORDED_TEXT} It had been recorded before.</p>")
    if not answer.is_useful:
        return _page("Not counted", f"<p>{ALREADY_VOTED_TEXT}</p>", 409)
    return _page(question.title, f"<p>{RECORDED_TEXT}</p>")


async def _answer_json(request: Request[bytes], token: str) -> Response:
    """Deliver a decision of a program; the same decision posted again after a lost response is the same vote."""
    target = _path_ids(request)
    if target is None or not await request.engine.is_token_of(*target, WaitpointToken(token)):
        raise HttpError(404, WAITPOINT_NOT_FOUND)
    try:
        json_limits.decode(request.body)
    except json_limits.NumberTooLong as fault:
        raise bad_request(f"invalid JSON: {fault}") from None
    except (msgspec.DecodeError, RecursionError):
        raise bad_request("invalid JSON: Bad Request") from None
    try:
        answer = await request.engine.deliver_signal(
            _vote(
                target,
                token,
                signal_id=request.engine.minter.uuid(),
                by=request.query_param("by") or "",
                payload=request.body,
                idempotency_key=hashlib.sha256(request.body).hexdigest(),
            )
        )
    except (errors.InvalidToken, errors.NotFound):
        raise HttpError(404, WAITPOINT_NOT_FOUND) from None
    if isinstance(answer, Accepted) and not answer.is_useful:
        raise HttpError(409, ALREADY_VOTED_TEXT, kind="state_conflict", retryable=False)
    return variant_response(answer)


def _vote(
    target: tuple[str, str], token: str, *, signal_id: str, by: str, payload: bytes, idempotency_key: str
) -> SignalArgs:
    execution_id, waitpoint_id = target
    return SignalArgs(
        execution_id=execution_id,
        waitpoint_id=waitpoint_id,
        signal_id=signal_id,
        signal_name="vote",
        signal_category="approval",
        source_type="link",
        source_identity=by.replace("\x00", "")[:MAX_NAME_CHARS],
        waitpoint_token=token,
        payload=payload,
        payload_encoding="json",
        idempotency_key=idempotency_key,
    )


def _path_ids(request: Request[Any]) -> tuple[str, str] | None:
    """Return the execution and waitpoint ids in the path; None if they are malformed."""
    try:
        return ids.parse_execution_id(request.path_params[0]), ids.parse_uuid(request.path_params[1])
    except errors.InvalidInput:
        return None


async def _question(request: Request[Any], token: str) -> ApprovalQuestion | None:
    if (target := _path_ids(request)) is None:
        return None
    execution_id, waitpoint_id = target
    # One load, whatever is wrong, so that the duration of a refusal reveals nothing.
    expected = await request.engine.read_token_of(execution_id, waitpoint_id)
    if expected is None or expected != WaitpointToken(token):
        return None
    record = await request.engine.describe_waitpoint(execution_id, waitpoint_id)
    if record is None:
        return None
    snapshot = await request.engine.describe_execution(execution_id)
    tags = {} if snapshot is None else snapshot.tags
    name = approval_name(record.waitpoint_key)
    schema = vote_schema(tags, record.waitpoint_key)
    return ApprovalQuestion(
        execution_id,
        waitpoint_id,
        token,
        name.replace("_", " "),
        _json(tags.get("ff.show")),
        {"type": "boolean", "title": "Approve?"} if schema is None else schema,
    )


def _json(text: str | None) -> Any:
    try:
        return None if text is None else json_limits.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _form(request: Request[Any], question: ApprovalQuestion, error: str = "") -> Response:
    token = escape(question.token, quote=True)
    error_html = f'<p class="bad">{escape(error)}</p>' if error else ""
    return _page(
        question.title,
        f"{approval_form.render_facts(question.shown)}{error_html}"
        f'<form method="post" action="?">{approval_form.render_prefix(question.schema)}\n'
        f'<input type="hidden" name="token" value="{token}">'
        f'<input type="hidden" name="once" value="{request.engine.minter.uuid()}">\n'
        f"{approval_form.render_fields(question.schema)}"
        f'<label>Your name<input type="text" name="by" maxlength="{MAX_NAME_CHARS}"></label>\n'
        f"{approval_form.render_buttons(question.schema)}\n</form>",
        400 if error else 200,
    )


def _page(title: str, body: str, status: int = 200) -> Response:
    html = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )
    return Response(status, html.encode(), HTML, SECURITY_HEADERS)
