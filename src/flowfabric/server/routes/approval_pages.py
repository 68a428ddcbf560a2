"""The approval page behind a signed link: shows the question and delivers the decision as a signal.

The token in the link is the only credential. A wrong link, a used one and one that never existed get the same response.
Programs post their decision to the link itself, as JSON, and get JSON back.
"""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from flowfabric import errors, ids, json_limits
from flowfabric.api.encoding import RedactedRepr
from flowfabric.console import paper
from flowfabric.engine.types import Accepted, DuplicateDelivery, SignalArgs, WaitpointToken, approval_name, vote_schema
from flowfabric.server import approval_form
from flowfabric.server.errors import HttpError, bad_request
from flowfabric.server.request import Request, encode, variant_response
from flowfabric.server.routing import HTML, SIGNAL_LIMIT, QueryParam, Response, RouteGroup, one_of

routes = RouteGroup("waitpoint pages")

PATH = "/v1/waitpoints/{id}/{waitpoint_id}"
SECURITY_HEADERS = (
    (
        "content-security-policy",
        (
            "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; "
            "frame-ancestors 'none'"
        ),
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
    return _page(request, "Not found", LINK_INVALID_TEXT, 404) if question is None else _form(request, question)


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
        return _page(request, "Not understood", "The form could not be read.", 400)
    question = await _question(request, fields.get("token", ""))
    if question is None:
        return _page(request, "Not found", LINK_INVALID_TEXT, 404)
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
        return _page(request, "Too late", LINK_INVALID_TEXT, 409)
    if isinstance(answer, DuplicateDelivery):
        return _page(request, question.title, f"{RECORDED_TEXT} It had been recorded before.")
    if not answer.is_useful:
        return _page(request, "Not counted", ALREADY_VOTED_TEXT, 409)
    return _page(request, question.title, RECORDED_TEXT)


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
    return _page(request, question.title, "", 400 if error else 200, question=question, error=error)


def _page(
    request: Request[Any],
    title: str,
    text: str,
    status: int = 200,
    *,
    question: ApprovalQuestion | None = None,
    error: str = "",
) -> Response:
    html = paper.render(
        request.mount_path,
        "waitpoint.html",
        title=title,
        text=text,
        error=error,
        token="" if question is None else question.token,
        once=request.engine.minter.uuid(),
        facts=[] if question is None else approval_form.fact_texts(question.shown),
        form=None if question is None else approval_form.render_form(question.schema),
        max_name_chars=MAX_NAME_CHARS,
    )
    return Response(status, html, HTML, SECURITY_HEADERS)
