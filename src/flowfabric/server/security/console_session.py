"""Sessions of the console: the session cookie, the check of writes, and the limit on logins.

A session is a token of the store below the token that opened it (`Engine.open_session`), so every server of the store
knows it and revoking the token ends it. The secret is in an HttpOnly cookie: it never reaches JavaScript or a URL.

A write needs two things: the browser says that a page of this origin sent it, and the form has a field that only this
session can make for this path.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flowfabric.server.errors import HttpError

if TYPE_CHECKING:
    from flowfabric.server.request import Request
    from flowfabric.server.settings import ServerSettings

COOKIE, SECURE_COOKIE = "ff", "__Host-ff"
THEME_COOKIE = "ff-theme"
CSRF_FIELD = "csrf"
COOKIE_S = 7 * 24 * 60 * 60
LOGIN_ATTEMPTS = 10  # failures in a row from one address
LOGIN_ATTEMPTS_PER_S = 0.1
FOREIGN_WRITE = "this form was not sent by a page of this server"
STALE_FORM = "this form belongs to another session: load the page again"

_SECRET = re.compile(r"[A-Za-z0-9_-]{20,128}").fullmatch


def is_secure(settings: ServerSettings) -> bool:
    """True if browsers reach the server over TLS."""
    return bool(settings.public_url and settings.public_url.startswith("https:"))


def cookies(request: Request[Any]) -> dict[str, str]:
    """Return the cookies of a request; a malformed header has none."""
    try:
        jar = SimpleCookie(request.headers.get(b"cookie", b"").decode("latin-1"))
    except CookieError:
        return {}
    return {name: morsel.value for name, morsel in jar.items()}


def session_cookie(request: Request[Any]) -> str | None:
    """Return the secret of the session."""
    name = SECURE_COOKIE if is_secure(request.app.settings) else COOKIE
    secret = cookies(request).get(name)
    return secret if secret is not None and _SECRET(secret) else None


def set_cookie(settings: ServerSettings, secret: str, *, max_age_s: int = COOKIE_S) -> tuple[str, str]:
    """Return the header that keeps a session in the browser; `max_age_s=0` removes it."""
    name, secure = (SECURE_COOKIE, "; Secure") if is_secure(settings) else (COOKIE, "")
    return "set-cookie", f"{name}={secret}; Path=/; Max-Age={max_age_s}; HttpOnly; SameSite=Strict{secure}"


def new_secret() -> str:
    """Return a secret for the forms of a browser that needs no login."""
    return secrets.token_urlsafe(32)


def is_read_by_console(request: Request[Any]) -> bool:
    """True for a read of the API by a page of this server; only for these the cookie counts outside of the console.

    If the console hides or redacts payloads, its cookie is none for the API, which does neither.
    """
    hides = request.app.settings.hide_payloads or request.app.redact is not None
    return (
        request.method in ("GET", "HEAD")
        and (request.path == "/ui/live" or (request.path.startswith("/v1/") and not hides))
        and b"authorization" not in request.headers
        and request.headers.get(b"sec-fetch-site") == b"same-origin"
    )


def form_token(secret: str, path: str) -> str:
    """Return the hidden field of a form that posts to a path."""
    return hmac.new(secret.encode(), f"form {path}".encode(), hashlib.sha256).hexdigest()[:40]


def check_origin(request: Request[Any]) -> None:
    """Raise 403 unless a page of this server sent the request."""
    site, origin = request.headers.get(b"sec-fetch-site"), request.headers.get(b"origin")
    if site is not None:
        if site == b"same-origin":
            return
    elif origin is not None and _is_own_origin(request, origin.decode("latin-1")):
        return
    raise HttpError(403, FOREIGN_WRITE, kind="forbidden", retryable=False)


def check_form(request: Request[Any], secret: str, given: str) -> None:
    """Raise 403 unless a page of this server and of this session sent the form to this path."""
    check_origin(request)
    if not hmac.compare_digest(form_token(secret, request.path).encode(), given.encode()):
        raise HttpError(403, STALE_FORM, kind="forbidden", retryable=False)


def _is_own_origin(request: Request[Any], origin: str) -> bool:
    try:
        given, public = urlsplit(origin), urlsplit(request.app.settings.public_url or "")
    except ValueError:
        return False
    if public.netloc and (given.scheme, given.netloc) == (public.scheme, public.netloc):
        return True
    return bool(given.netloc) and given.netloc == request.headers.get(b"host", b"").decode("latin-1")
