"""The pictures of `docs/console.md`: `./dev py -m tests.console.pictures`.

With a folder as argument they are taken in both themes and at phone width, too, to be looked at.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from playwright.async_api import Browser

from flowfabric.server import ServerSettings, create_app
from tests.console.browser import Watched, open_browser
from tests.console.sample import Sample, sample_world
from tests.console.test_pages import run_path
from tests.server.api_client import run_server

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
DESKTOP = {"width": 1080, "height": 720}
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": DESKTOP, "color_scheme": "light"},
    "dark": {"viewport": DESKTOP, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
}


async def take_pictures(
    sample: Sample, browser: Browser, base: str, folder: Path, look: str = "light", *, whole: bool = False
) -> list[Path]:
    """Take a picture of every page, of what is in view or of all of it; return the files."""
    taken = []
    watched = Watched(await browser.new_context(**LOOKS[look]), base)
    paths = {
        "overview": "",
        "runs": "/runs",
        "run": run_path(sample, "research"),
        "approvals": "/approvals",
        "flow": f"/flows/{sample.flow.id}",
        "lanes": "/lanes",
        "budgets": "/budgets",
        "events": "/events",
        "schedules": "/schedules",
        "schedule": "/schedules/yearly",
        "submit": f"/submit?again={sample.runs['purchase'].id}",
        "bulk": "/bulk/new?verb=cancel&state=delayed",
        "tokens": "/tokens",
        "store": "/store",
    }
    for name, path in paths.items():
        page = await watched.open(path)
        if name == "flow":
            await page.locator("#graph[data-ready-ms]").wait_for()
        file = folder / f"console-{name}.png"
        await page.screenshot(path=file, full_page=whole)
        await page.close()  # browsers keep six connections to a host, and every open page follows its changes
        taken.append(file)
    await watched.close()
    return taken


async def main(looks: Path | None) -> None:
    """Take the pictures of a fresh sample."""
    async with (
        sample_world("memory://") as sample,
        run_server(create_app(sample.engine, ServerSettings())) as base,
        open_browser() as browser,
    ):
        if looks is None:
            taken = await take_pictures(sample, browser, base, FOLDER)
        else:
            taken = []
            for look in LOOKS:
                (looks / look).mkdir(parents=True, exist_ok=True)
                taken += await take_pictures(sample, browser, base, looks / look, look, whole=True)
    for file in taken:
        print(file, file.stat().st_size)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
