"""Blocking variants: for scripts without a loop, and for threads while a loop runs elsewhere."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flowfabric import Context, Fabric, RunCancelled
from flowfabric.model.states import PublicState
from flowfabric.sdk.run import OutputFrame
from flowfabric.testing.world import World
from tests.sdk.conftest import running_worker

world_app = Fabric("sqlite:////nowhere/at/all.db")


@world_app.task
def inner(n: int) -> int:
    return n + 1


@world_app.task
def outer(n: int) -> int:
    return inner.sync.submit(n).result(timeout=60) * 10


def test_a_script_without_a_loop_submits_and_waits(tmp_path: Path) -> None:
    script = tmp_path / "shop.py"
    script.write_text(
        textwrap.dedent(f"""
            import sys, threading
            from flowfabric import Fabric

            app = Fabric("sqlite:///{tmp_path / "shop.db"}")

            @app.task
            def double(n: int) -> int:
                return n * 2

            if __name__ == "__main__":
                if sys.argv[1:] == ["worker"]:
                    app.run()
                else:
                    print([run.result(timeout=20) for run in double.sync.submit_many(range(3))])
                    print(double.sync.submit(21).result(timeout=20))
                    print(double.options(key="once").sync.submit(1).id == double.options(key="once").sync.submit(2).id)
        """)
    )
    worker = subprocess.Popen([sys.executable, str(script), "worker"])
    try:
        said = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=40)
    finally:
        worker.terminate()
        worker.wait(20)
    assert said.stdout.split("\n")[:3] == ["[0, 2, 4]", "42", "True"], said.stderr
    assert said.returncode == 0
    assert said.stderr == ""


async def test_a_thread_uses_the_loop_that_runs_elsewhere(app: Fabric) -> None:
    @app.task
    async def double(n: int) -> int:
        return n * 2

    def in_thread() -> list[int]:
        return [double.sync.submit(n).result(timeout=20) for n in range(3)]

    async with running_worker(app):
        assert await asyncio.to_thread(in_thread) == [0, 2, 4]


async def test_a_plain_handler_submits_other_work_and_waits_for_it() -> None:
    async with World(world_app, slots=2):
        assert await (await outer.submit(4)).result() == 50


async def test_a_run_can_be_observed_and_cancelled_without_a_loop(app: Fabric) -> None:
    @app.task
    async def never() -> None: ...

    def in_thread() -> None:
        run = never.sync.submit()
        assert run.created
        assert run.task == never.name
        assert run.state() is PublicState.WAITING
        assert run.describe().execution_id == run.id
        assert run.attempts() == []
        assert run.explain().execution_id == run.id
        assert run.progress() == {}
        run.signal("steer", 1)
        again = app.sync.find(run.id)
        again.cancel("enough")
        with pytest.raises(RunCancelled, match="enough"):
            run.result(timeout=5)
        run.replay()
        assert run.state() is PublicState.WAITING

    await asyncio.to_thread(in_thread)


async def test_a_stream_is_an_iterator(app: Fabric) -> None:
    @app.task
    async def talk(ctx: Context) -> None:
        for word in ("one", "two"):
            await ctx.stream("answer").write(word)

    def in_thread() -> list[str]:
        return [one.text for one in talk.sync.submit().stream("answer") if isinstance(one, OutputFrame)]

    async with running_worker(app):
        assert await asyncio.to_thread(in_thread) == ["one", "two"]


async def test_blocking_on_the_loop_itself_is_refused(app: Fabric) -> None:
    @app.task
    async def never() -> None: ...

    with pytest.raises(RuntimeError, match=r"await the method without \.sync"):
        never.sync.submit()
    engine = await app.engine()
    assert (await engine.search_executions()).executions == []
