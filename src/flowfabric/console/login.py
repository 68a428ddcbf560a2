"""Login with an API token or a one-time link, logout, and the choice of the theme."""

from __future__ import annotations

from typing import Any, ClassVar
from urllib.parse import urlsplit

from flowfabric.console import pages
from flowfabric.console.pages import (
    PREFIX,
    SECURITY_HEADERS,
    Ui,
    View,
    error_page,
    form_fields,
    redirect,
    render,
    routes,
)
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server import logging
from flowfabric.server.errors import HttpError
from flowfabric.server.request import Request, json_response
from flowfabric.server.routing import HTML, Response
from flowfabric.server.security import console_session
from flowfabric.server.security.auth import ALL_SCOPES, ANONYMOUS

MAX_NAME_CHARS = 100
WRONG_TOKEN = "This token is not valid."
WRONG_LINK = "This link is not valid: it was used, or it is older than five minutes."
THEMES = ("light", "dark", "system")


class LoginPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "login.html"
    next: str
    link: str = ""
    error: str = ""


@routes.get(f"{PREFIX}/login", {200: HTML}, scope=None, error_page=error_page)
async def show_login(request: Request[None]) -> Response:
    """Show the form that takes a token, or the button of a one-time link."""
    if request.app.settings.is_open:
        return redirect(_nobody(request), _nobody(request).url())
    return _login(request, request.query_param("next") or "", link=request.query_param("link") or "")


@routes.post(f"{PREFIX}/login", {303: None}, scope=None, body=bytes, audit=True, error_page=error_page)
async def log_in(request: Request[bytes]) -> Response:
    """Open a session below the given token."""
    console_session.check_origin(request)
    fields = form_fields(request)
    address = f"login from {request.client_address}"
    request.app.login_limiter.check(address)
    created = await _open_session(request, fields)
    if created is None:
        request.app.login_limiter.acquire(address)
        wrong = WRONG_LINK if fields.get("link") else WRONG_TOKEN
        return _login(request, fields.get("next", ""), error=wrong, status=403)
    ui = _nobody(request)
    ui.headers.append(console_session.set_cookie(request.app.settings, created))
    return redirect(ui, _target(ui, fields.get("next", "")))


async def _open_session(request: Request[bytes], fields: dict[str, str]) -> str | None:
    """Return the secret of a new session; None if token or link are not valid. Each costs one load at least."""
    engine, authenticator = request.app.engine, request.app.authenticator
    if fields.get("link"):
        opened = await engine.redeem_login_link(fields["link"], authenticator.root_parents)
        return None if opened is None else opened.token
    token = fields.get("token", "").strip()
    holder = await engine.authenticate_token(token)
    root = authenticator.root_parent(token.encode())
    name = " ".join(fields.get("name", "").split())[:MAX_NAME_CHARS]
    if root is not None:
        opened = await engine.open_session(parent=root, name=name or "root", scopes=ALL_SCOPES)
    elif holder is not None:
        opened = await engine.open_session(
            parent=holder.token_id, name=name or holder.name, scopes=holder.scopes, namespaces=holder.namespaces
        )
    else:
        return None
    logging.log_audit("console_login", {"who": name or "root", "about": opened.token_id, "outcome": "done"})
    return opened.token


@routes.post(f"{PREFIX}/links", {200: None}, scope=None, body=bytes, refusals=(401,), audit=True)
async def make_login_link(request: Request[bytes]) -> Response:
    """Make a link that opens one session within five minutes; only a token in the header may ask for it."""
    ui = _nobody(request)
    if request.app.settings.is_open:
        return json_response({"path": ui.url()})
    token = request.headers.get(b"authorization", b"").removeprefix(b"Bearer ")
    root, holder = request.app.authenticator.root_parent(token), None
    if root is None:
        holder = await request.app.engine.authenticate_token(token.decode("ascii", "replace"))
        if holder is None:
            raise HttpError(401, WRONG_TOKEN)
    made = await request.app.engine.open_session(
        parent=root or (holder.token_id if holder else ""),
        name=holder.name if holder else "root",
        scopes=holder.scopes if holder else ALL_SCOPES,
        namespaces=holder.namespaces if holder else None,
        is_link=True,
    )
    return json_response({"path": ui.url("/login", link=made.token)}, 200, ("cache-control", "no-store"))


@pages.action("/logout", scope=ApiScope.READ)
async def log_out(ui: Ui, fields: Any) -> str:
    """End the session."""
    if not ui.is_open:
        await ui.engine.revoke_api_token(ui.principal.name.rpartition("(")[2].rstrip(")"))
        ui.request.app.authenticator.clear_cache()
    ui.headers.append(console_session.set_cookie(ui.request.app.settings, "", max_age_s=0))
    return ui.url("/login")


@pages.action("/theme", scope=ApiScope.READ)
async def choose_theme(ui: Ui, fields: Any) -> str:
    """Keep the chosen theme in a cookie, so that the server draws the right one."""
    theme = fields.get("theme", "")
    if theme in THEMES:
        age = 0 if theme == "system" else 365 * 24 * 60 * 60
        name = console_session.THEME_COOKIE
        ui.headers.append(("set-cookie", f"{name}={theme}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict"))
    return _target(ui, fields.get("next", ""))


def _nobody(request: Request[Any]) -> Ui:
    return Ui(request, ANONYMOUS, "")


def _target(ui: Ui, after: str) -> str:
    """Return a page of the console to go to; anything else leads to the overview."""
    parts = urlsplit(after)
    is_page = parts.path == PREFIX or parts.path.startswith(f"{PREFIX}/")
    if parts.scheme or parts.netloc or not is_page or "\\" in after or any(ord(char) < 32 for char in after):
        return ui.url()
    return ui.request.mount_path + after


def _login(request: Request[Any], after: str, *, link: str = "", error: str = "", status: int = 200) -> Response:
    view = LoginPage(title="Log in", next=after, link=link, error=error)
    return Response(status, render(_nobody(request), view), HTML, SECURITY_HEADERS)
