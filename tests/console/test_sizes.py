"""How large the console is: over the built wheel, and on the wire."""

from __future__ import annotations

import subprocess
import sys
import time
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from flowfabric.bench.search import fill
from flowfabric.connector import open_engine
from flowfabric.engine.engine import Engine
from flowfabric.server import ServerSettings, create_app
from tests.console.sample import Sample, sample_world
from tests.console.visitor import Visitor, read

ROOT = Path(__file__).resolve().parents[2]
KB = 1024
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sample() -> AsyncIterator[Sample]:
    """Runs in every state; the size of a page does not depend on the store."""
    async with sample_world("memory://") as sample:
        yield sample


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """The sizes of the console's files in the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        prefix = "flowfabric/console/"
        return {
            info.filename.removeprefix(prefix): info.file_size
            for info in archive.infolist()
            if info.filename.startswith(prefix)
        }


async def test_the_files_in_the_wheel_stay_small(wheel: dict[str, int]) -> None:
    assert wheel["static/console.css"] <= 16 * KB
    assert wheel["static/live.js"] + wheel["static/flow_graph.js"] <= 14 * KB
    assert wheel["static/htmx.min.js"] <= 38 * KB
    assert "static/LICENSE.htmx" in wheel
    assert sum(size for name, size in wheel.items() if name.startswith("templates/")) <= 60 * KB


async def test_a_list_with_its_files_is_at_most_100_kb_on_the_wire(sample: Sample) -> None:
    await sample.purchase.options(delay="1h").submit_many([f"kite {number}" for number in range(50)])
    visitor = Visitor(create_app(sample.engine, ServerSettings()))
    answer = await visitor.get("/runs")
    total = len(answer.content)
    for tag, values in read(answer.text).tags:
        address = values.get("src") or (values.get("href") if tag == "link" else None)
        if address:
            total += len((await visitor.client.get(address)).content)
    assert total <= 100 * KB


class TimedApp:
    """An app that notes how much time of this process each request takes, in all threads."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.took_ms: list[float] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        began = time.process_time()
        await self.app(scope, receive, send)
        self.took_ms.append((time.process_time() - began) * 1000)


async def process_time_ms(engine: Engine, path: str) -> float:
    """Return the least time of this process that a page takes."""
    app = TimedApp(create_app(engine, ServerSettings()))
    visitor = Visitor(app)
    for _ in range(100):
        answer = await visitor.get(path)
        assert answer.status_code == 200, answer.text
    return min(app.took_ms)


@pytest.mark.serial
async def test_a_page_costs_at_most_10_ms_of_this_process(sample: Sample) -> None:
    assert await process_time_ms(sample.engine, "/runs") <= 10


@pytest.mark.timeout(300)
@pytest.mark.serial
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "waiting"])
async def test_a_page_costs_at_most_10_ms_at_100_000_runs(tmp_path: Path, *, ended: bool) -> None:
    url = f"sqlite:///{tmp_path}/deep.db"
    async with await open_engine(url) as engine:
        await fill(engine, url, 100_000, ended=ended)
        listed = await Visitor(create_app(engine, ServerSettings())).get("/runs")
        assert listed.text.count(" data-href=") == 50
        run_id = (await engine.search_executions(limit=1)).executions[0].execution_id
        for path in ("", "/runs", "/runs?state=failed", "/approvals", "/lanes", "/lanes/bench", f"/runs/{run_id}"):
            assert await process_time_ms(engine, path) <= 10, path
        overview = (await Visitor(create_app(engine, ServerSettings())).get("")).text
        assert ('<span class="big">0</span>waiting' if ended else '<span class="big">2,000+</span>waiting') in overview
