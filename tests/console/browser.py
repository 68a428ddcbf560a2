"""A real browser: Debian's headless Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Error, Page, async_playwright
from playwright.async_api import Request as BrowserRequest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser")
FIX = "apt-get install -y chromium-headless-shell fonts-dejavu-core libatomic1"
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run", "--disable-quic", "--disable-dev-shm-usage"),
]


@asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """Start the browser; a missing one is an error that says how to get it."""
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    assert path is not None, f"the tests of the console need a browser.\nFix: {FIX}"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            await browser.close()


class Watched:
    """A browser context that notes everything that must not happen on a page."""

    def __init__(self, context: BrowserContext, base: str) -> None:
        self.context = context
        self.base = base
        self.faults: list[str] = []
        context.on("console", self._note_console)
        context.on("weberror", lambda error: self.faults.append(f"error: {error.error}"))
        context.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))
        context.on("request", self._note_request)

    def _note_console(self, message: ConsoleMessage) -> None:
        expected = "the server responded with a status of 4" in message.text
        if message.type in ("error", "warning") and not expected:
            self.faults.append(f"console: {message.text}")

    def _note_request(self, request: BrowserRequest) -> None:
        if not request.url.startswith((self.base, "data:")):
            self.faults.append(f"request to {request.url}")

    async def open(self, path: str = "") -> Page:
        """Open a page of the console."""
        page = await self.context.new_page()
        await page.goto(f"{self.base}/ui{path}")
        return page

    async def log_in(self, token: str, name: str = "") -> Page:
        """Log in with the form."""
        page = await self.open("/login")
        await page.get_by_label("API token").fill(token)
        await page.get_by_label("Your name").fill(name)
        await page.get_by_role("button", name="Log in").click()
        await page.wait_for_url(f"{self.base}/ui")
        return page

    async def close(self) -> None:
        """Close it; fail if something happened that must not."""
        with suppress(Error):
            await self.context.close()
        assert not self.faults, self.faults


Visit = Callable[..., Awaitable[Watched]]
