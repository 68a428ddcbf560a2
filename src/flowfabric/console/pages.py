"""Pages and actions: how a function of the console becomes routes.

One page is one function and one URL. The function reads and returns a struct; the struct names its template. The same
URL with `.json` returns the struct itself. A live page is asked for again, and `ETag` says whether it has changed.

An action is a form that posts: it needs a scope and the token of the form, calls an operation of the engine, and leads
to a page with 303. Both check the namespaces of the caller.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qsl, quote, unquote, urlencode
from weakref import WeakKeyDictionary

import msgspec

from flowfabric import __version__, errors
from flowfabric.console import paper, show
from flowfabric.engine.engine import Engine
from flowfabric.model.security.api_token import ApiScope
from flowfabric.model.security.owned_id import DEFAULT_NAMESPACE
from flowfabric.server.errors import HttpError, bad_request
from flowfabric.server.request import JSON, Request, encode, path_execution_id
from flowfabric.server.routing import HTML, SIGNAL_LIMIT, Response, RouteGroup
from flowfabric.server.security import console_session
from flowfabric.server.security.auth import ANONYMOUS, Principal

if TYPE_CHECKING:
    from flowfabric.server.app import App

PREFIX = "/ui"
PAGE_SIZE = 50
CSV, CSV_ENDING = "text/csv; charset=utf-8", ".csv"
COUNT_AGE_S = 2.0
MAX_COUNTS = 1000
MAX_COUNTED = 200  # suspended runs that are read for the number in the menu
MAX_FORM_FIELDS = 300
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = (
    ("content-security-policy", POLICY),
    ("cross-origin-opener-policy", "same-origin"),
    ("referrer-policy", "same-origin"),
    ("x-content-type-options", "nosniff"),
    ("cache-control", "no-store"),
)
NOTICES = {
    "cancelled": "The run was cancelled.",
    "flow-cancelled": "The flow was cancelled.",
    "graph-changed": "The graph has changed; this is the new one.",
    "replayed": "The run was replayed: it starts again.",
    "revoked": "The lease was revoked: another worker takes the run over.",
    "nothing": "Nothing was left to do.",
    "priority": "The priority was changed.",
    "tagged": "The tags were set.",
    "sent": "The message was sent.",
    "voted": "Your answer was recorded.",
    "complete": "Your answer was recorded. It was the last one needed: the run continues.",
    "repeated": "This answer had been recorded before.",
    "not-counted": "An answer was given for this place before. That one counts, and yours does not.",
    "limits": "The limits were changed.",
    "reset": "The budget was reset.",
    "dead": "The worker was marked as dead.",
    "token-revoked": "The token was revoked.",
    "rotated": "The signing key was rotated.",
    "schedule-paused": "The schedule is paused.",
    "schedule-resumed": "The schedule continues with its next instant.",
    "stopped": "The bulk operation was stopped.",
}

routes = RouteGroup("console", is_documented=False)


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a page."""

    template: ClassVar[str]
    title: str
    about: str = ""  # the topic that the page follows: `run:ID`, `runs`, …; empty if it does not change


class Ui:
    """One request to the console: who asks, and what every template needs."""

    def __init__(self, request: Request[Any], principal: Principal, secret: str) -> None:
        self.request = request
        self.principal = principal
        self.secret = secret
        self.headers: list[tuple[str, str]] = []
        self.is_open = request.app.settings.is_open
        self.approvals = 0  # open approvals, for the menu
        self.etag = ""  # its script sends this to ask whether the page has changed

    # -- who ------------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        return self.request.app.engine

    @property
    def name(self) -> str:
        """The name of the caller, without the id of the session."""
        return "console" if self.is_open else self.principal.name.rpartition(" (")[0] or self.principal.name

    def may(self, scope: str) -> bool:
        """True if the caller has a scope; what the server would refuse is not drawn."""
        return ApiScope(scope) in self.principal.scopes

    @property
    def sees_all(self) -> bool:
        """True if the caller is not bound to namespaces."""
        return self.principal.namespaces is None

    def require_all_namespaces(self) -> None:
        """Raise 403 if the caller is bound to namespaces."""
        if not self.sees_all:
            raise HttpError(403, "token is bound to namespaces; this concerns all", kind="forbidden", retryable=False)

    @property
    def given_namespace(self) -> str | None:
        """The namespace that is asked for; raises 403 if the caller may not see it."""
        given = self.request.query_param("namespace") or None
        if given is not None:
            self.request.require_namespace(given)
        return given

    @property
    def namespaces(self) -> list[str] | None:
        """The namespaces of the caller; None is all."""
        return self.request.bound_namespaces()

    @property
    def namespace(self) -> str:
        """The namespace of lists that belong to one: the given one, else the caller's first, else `default`."""
        return self.given_namespace or (self.namespaces or [DEFAULT_NAMESPACE])[0]

    def new_id(self) -> str:
        """Return an id for a form, so that sending it twice is one action."""
        return self.engine.minter.uuid()

    # -- what -----------------------------------------------------------------------------------------------------

    async def execution_id(self) -> str:
        """Return the execution of the path; raise NotFound if the caller may not see it."""
        execution_id = path_execution_id(self.request.path_params[0].removesuffix(".json"))
        await self.request.require_execution_access(execution_id)
        return execution_id

    def payload(self, kind: str, data: bytes | None) -> show.Shown | None:
        """Return a payload as it may be shown."""
        app = self.request.app
        return show.payload(kind, data, redact=app.redact, hide=app.settings.hide_payloads)

    def payload_text(self, kind: str, data: bytes | None, most: int | None = None) -> str:
        """Return the text of a payload as it may be shown, at most so many characters of it."""
        shown = self.payload(kind, data)
        return "" if shown is None else shown.text[:most]

    # -- for templates --------------------------------------------------------------------------------------------

    def url(self, path: str = "", *names: str, **query: Any) -> str:
        """Return the URL of a page, below the mount point; parameters without a value are left out.

        Each name is one more segment of the path, whatever it contains.
        """
        given = {name: value for name, value in query.items() if value not in (None, "")}
        path = "/".join((quote(path, safe="/:.,~-_"), *(quote(name, safe=":") for name in names)))
        base = f"{self.request.mount_path}{PREFIX}{path}"
        return f"{base}?{urlencode(given)}" if given else base

    def api(self, path: str) -> str:
        """Return the URL of a route of the API."""
        return f"{self.request.mount_path}/v1{quote(path, safe='/:.,~-_')}"

    def static(self, name: str) -> str:
        return paper.static_url(self.request.mount_path, name)

    def form_token(self, path: str) -> str:
        """Return the hidden field of a form that posts to a page."""
        return console_session.form_token(self.secret, f"{PREFIX}{quote(path, safe='/:.,~-_')}")

    @property
    def theme(self) -> str:
        chosen = console_session.cookies(self.request).get(console_session.THEME_COOKIE, "")
        return chosen if chosen in ("light", "dark") else ""

    @property
    def section(self) -> str:
        """The first part of the path, for the menu."""
        return self.request.path.removeprefix(PREFIX).strip("/").partition("/")[0].removesuffix(".json")

    @property
    def notice(self) -> str:
        return NOTICES.get(self.request.query_param("done") or "", "")

    def here(self, **changes: str | None) -> str:
        """Return the URL of this page with some parameters changed."""
        query = {**self.request.query, **changes}
        path = unquote(self.request.path).removeprefix(PREFIX)
        return self.url(path, **{k: v for k, v in query.items() if k != "done"})

    @property
    def version(self) -> str:
        return __version__


# What a page or an action returns: its content, the URL of another page to which it leads, or a complete response.
Answer = View | str | Response
Page = Callable[[Ui], Awaitable[Answer]]
Action = Callable[[Ui, Mapping[str, str]], Awaitable[Answer]]


def page(path: str, *, scope: ApiScope = ApiScope.READ, rows: str = "") -> Callable[[Page], Page]:
    """Register a page, and the same as JSON; `rows` names the field of a list that is also there as CSV."""

    def add(read: Page) -> Page:
        async def handler(request: Request[None]) -> Response:
            ui = await enter(request, scope)
            if isinstance(ui, Response):
                return ui
            answer = await read(ui)
            if rows and request.path.endswith(CSV_ENDING):
                headers = (("content-disposition", f'attachment; filename="{rows}.csv"'), *SECURITY_HEADERS)
                return Response(200, show.csv_text(getattr(answer, rows)).encode(), CSV, headers)
            return await _to_response(ui, answer)

        handler.__name__, handler.__doc__ = read.__name__, read.__doc__
        paths = [path, f"{path}.json"] if path and not path.endswith(("}", ".json")) else [path]
        for each in [*paths, f"{path}{CSV_ENDING}"] if rows else paths:
            routes.get(f"{PREFIX}{each}", {200: HTML}, scope=None, error_page=error_page)(handler)
        return read

    return add


def action(path: str, *, scope: ApiScope) -> Callable[[Action], Action]:
    """Register an action: a POST that needs a scope and the token of its form, and is audited."""

    def add(act: Action) -> Action:
        async def handler(request: Request[bytes]) -> Response:
            ui = await enter(request, scope)
            if isinstance(ui, Response):
                return ui
            fields = form_fields(request)
            console_session.check_form(request, ui.secret, fields.get(console_session.CSRF_FIELD, ""))
            answer = await act(ui, fields)
            return await _to_response(ui, answer)

        handler.__name__, handler.__doc__ = act.__name__, act.__doc__
        routes.post(
            f"{PREFIX}{path}",
            {303: None},
            scope=None,
            body=bytes,
            limit=SIGNAL_LIMIT,
            audit=True,
            error_page=error_page,
        )(handler)
        return act

    return add


async def _to_response(ui: Ui, answer: Answer) -> Response:
    if isinstance(answer, Response):
        return answer
    return await respond(ui, answer) if isinstance(answer, View) else redirect(ui, answer)


async def enter(request: Request[Any], scope: ApiScope | None) -> Ui | Response:
    """Return who asks, with the scope; without a session, lead to the login."""
    settings, secret = request.app.settings, console_session.session_cookie(request)
    if settings.is_open:
        ui = Ui(request, ANONYMOUS, secret or console_session.new_secret())
        if secret is None:  # only the tokens of forms need it: no login is required
            ui.headers.append(console_session.set_cookie(settings, ui.secret))
    elif b"authorization" in request.headers and request.method == "GET":
        await request.app.authenticate(request)
        ui = Ui(request, request.principal, "")
    else:
        principal = None if secret is None else await request.app.authenticator.authenticate_session(secret)
        if principal is None or secret is None:
            return _to_login(request)
        ui = Ui(request, principal, secret)
    request.principal = ui.principal
    if scope is not None:
        ui.principal.require_scope(scope)
    return ui


def _to_login(request: Request[Any]) -> Response:
    """Lead a browser to the login; a program gets 401."""
    if wants_json(request):
        raise HttpError(401, "no session: log in, or send an Authorization header")
    login = f"{request.mount_path}{PREFIX}/login"
    if request.method == "GET":
        query = urlencode(request.query)
        login = f"{login}?{urlencode({'next': request.path + (f'?{query}' if query else '')})}"
    return Response(303, headers=(("location", login), *SECURITY_HEADERS))


def wants_json(request: Request[Any]) -> bool:
    return request.path.endswith((".json", CSV_ENDING)) or request.headers.get(b"accept", b"").startswith(JSON.encode())


def form_fields(request: Request[bytes]) -> dict[str, str]:
    """Parse a posted form; raise 400 if it is malformed."""
    try:
        return dict(parse_qsl(request.body.decode(), keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS))
    except (ValueError, UnicodeDecodeError):
        raise bad_request("the form could not be read") from None


def parse_integer(field: str, text: str) -> int:
    """Parse a whole number of a form; raise 400 otherwise."""
    cleaned = text.strip().replace(",", "").replace("_", "")
    if not cleaned.removeprefix("-").isdecimal() or not cleaned.isascii() or len(cleaned) > 19:
        raise bad_request(f"{field}: {text[:40]!r} is not a whole number")
    return int(cleaned)


def parse_json(field: str, text: str) -> bytes:
    """Check JSON of a form and return its bytes; raise 400 otherwise."""
    try:
        msgspec.json.decode(text.encode() or b"null")
    except (msgspec.DecodeError, RecursionError) as fault:
        raise bad_request(f"{field}: {fault}; a text needs quotes") from None
    return text.encode() or b"null"


def redirect(ui: Ui, location: str) -> Response:
    return Response(303, headers=(("location", location), *ui.headers, *SECURITY_HEADERS))


async def respond(ui: Ui, view: View, status: int = 200) -> Response:
    """Render a view; 304 if the browser has it already."""
    if wants_json(ui.request):
        return Response(status, encode(view), JSON, SECURITY_HEADERS)
    ui.approvals = await count_approvals(ui)
    tag = hashlib.sha256(encode((type(view).__name__, view, ui.approvals, ui.principal.name, __version__))).hexdigest()
    ui.etag = f'"{tag[:32]}"'
    headers = (("etag", ui.etag), *ui.headers, *SECURITY_HEADERS)
    if status == 200 and ui.request.headers.get(b"if-none-match", b"").decode("latin-1") == ui.etag:
        return Response(304, headers=headers)
    return Response(status, render(ui, view), HTML, headers)


def render(ui: Ui, view: View) -> bytes:
    return paper.templates().get_template(view.template).render(ui=ui, page=view).encode()


_approval_counts: WeakKeyDictionary[App, dict[frozenset[str] | None, tuple[float, int]]] = WeakKeyDictionary()


async def count_approvals(ui: Ui) -> int:
    """Count the open approvals for the menu, at most every few seconds for each set of namespaces."""
    now, key = asyncio.get_running_loop().time(), ui.principal.namespaces
    counts = _approval_counts.setdefault(ui.request.app, {})
    known = counts.get(key)
    if known is not None and now - known[0] < COUNT_AGE_S:
        return known[1]
    if len(counts) >= MAX_COUNTS:
        counts.clear()
    found = await ui.engine.list_approvals(namespaces=ui.namespaces, limit=MAX_COUNTED)
    counts[key] = (now, len(found.approvals))
    return len(found.approvals)


class ErrorPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "error.html"
    status: int
    text: str


def error_page(request: Request[Any], status: int, text: str) -> Response:
    """Render an error as a page; programs get JSON."""
    words = text or {401: "You are not logged in.", 404: "There is no such page."}.get(status, "It was refused.")
    if wants_json(request):
        return Response(status, encode({"error": words}), JSON, SECURITY_HEADERS)
    view = ErrorPage(title=_ERROR_TITLES.get(status, "It did not work"), status=status, text=words)
    ui = Ui(request, request.principal, "")
    return Response(status, render(ui, view), HTML, SECURITY_HEADERS)


_ERROR_TITLES = {
    400: "Not understood",
    401: "Not logged in",
    403: "Not allowed",
    404: "Not found",
    409: "Too late",
    429: "Too many requests",
}


@routes.get(f"{PREFIX}/{{page}}", {200: HTML}, scope=None, error_page=error_page)
async def missing_page(request: Request[None]) -> Response:
    """Answer 404 for a path without a page."""
    raise errors.NotFound("page")


@routes.get("/", {303: None}, scope=None)
async def root(request: Request[None]) -> Response:
    """Lead a browser to the console; for programs there is nothing."""
    return await with_slash(request) if b"text/html" in request.headers.get(b"accept", b"") else Response(404)


@routes.get(f"{PREFIX}/", {200: HTML}, scope=None)
async def with_slash(request: Request[None]) -> Response:
    """Lead to the overview."""
    return Response(303, headers=(("location", f"{request.mount_path}{PREFIX}"), *SECURITY_HEADERS))
