"""`RunFailed`: what a caller learns about the exception that ended a run."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric import Context, Fabric, Fatal, Retry, RunFailed
from flowfabric.testing.world import World
from tests.executions import claim_one
from tests.sdk.conftest import running_worker


class Declined(Exception):
    def __init__(self, card: str, code: int) -> None:
        super().__init__(f"card {card} was declined")
        self.code = code


def define_tasks(app: Fabric) -> None:
    class Local(Exception):
        pass

    @app.task(name="fail")
    async def fail(kind: str) -> None:
        match kind:
            case "declined":
                raise Declined("4242", code=7)
            case "fatal":
                raise Fatal("no use")
            case "timeout":
                raise TimeoutError("too slow")
            case "local":
                raise Local("here")
            case "group":
                async with asyncio.TaskGroup() as group:
                    group.create_task(fail.handler("declined"))
            case "exit":
                raise SystemExit(3)
        raise LookupError(kind)

    @app.task(name="fail_plainly")
    def fail_plainly(kind: str) -> None:
        raise Declined("1", code=1)

    @app.task(name="parent")
    async def parent(ctx: Context, kind: str) -> str:
        try:
            await (await ctx.spawn(fail, kind)).result()
        except RunFailed as failed:
            return f"{failed.type.rpartition('.')[2]} {failed.text} {type(failed.__cause__).__name__}"
        return "no failure"


app = Fabric("sqlite:////nowhere/at/all.db")
define_tasks(app)

CASES = [
    ("declined", f"{__name__}.Declined", "card 4242 was declined", "Declined", Declined),
    ("fatal", "flowfabric.sdk.exceptions.Fatal", "no use", "permanent", Fatal),
    ("timeout", "TimeoutError", "too slow", "timeout", TimeoutError),
    ("local", f"{__name__}.define_tasks.<locals>.Local", "here", "Local", None),
    ("group", f"{__name__}.Declined", "card 4242 was declined", "Declined", Declined),
    ("exit", "SystemExit", "3", "SystemExit", None),
]


@pytest.mark.parametrize(("kind", "name", "text", "category", "cause"), CASES, ids=[case[0] for case in CASES])
async def test_a_failed_run_names_type_text_category_and_cause(
    app: Fabric, kind: str, name: str, text: str, category: str, cause: type[BaseException] | None
) -> None:
    define_tasks(app)
    async with running_worker(app):
        run = await app.tasks["fail"].submit(kind)
        with pytest.raises(RunFailed) as caught:
            await run.result("20s")
    failed = caught.value
    assert (failed.type, failed.text, failed.category) == (name, text, category)
    assert text in failed.reason
    if cause is None:
        assert failed.__cause__ is None
    else:
        assert type(failed.__cause__) is cause
        assert str(failed.__cause__) == text
    if isinstance(failed.__cause__, Declined):
        assert failed.__cause__.code == 7


async def test_blocking_code_gets_the_same(shared_app: Fabric) -> None:
    define_tasks(shared_app)
    async with running_worker(shared_app):
        run = await shared_app.tasks["fail_plainly"].submit("x")
        with pytest.raises(RunFailed) as caught:
            await asyncio.to_thread(run.sync.result, "20s")
    assert (caught.value.category, caught.value.text) == ("Declined", "card 1 was declined")
    assert isinstance(caught.value.__cause__, Declined)


async def test_a_world_has_typed_failures() -> None:
    async with World(app):
        run = await app.tasks["fail"].options(retry=Retry(max=2)).submit("declined")
        with pytest.raises(RunFailed) as caught:
            await run.result()
        assert isinstance(caught.value.__cause__, Declined)
        errors = [attempt.error for attempt in await run.attempts()]
        assert [None if error is None else error.text for error in errors] == ["card 4242 was declined"] * 3


async def test_a_parent_gets_the_failure_of_its_child() -> None:
    async with World(app):
        run = await app.tasks["parent"].submit("declined")
        assert await run.result() == "Declined card 4242 was declined Declined"


async def test_a_run_that_failed_without_an_exception_has_its_reason_as_text() -> None:
    async with World(app) as world:
        run = await app.tasks["fail"].options(delay="1h").submit("declined")
        await world.kill(world._workers[0][0])
        await world.advance("2h")
        claimed = await claim_one(world.engine, worker_instance_id="w")
        await world.engine.fail(claimed.handle, reason="by hand", category="permanent")
        with pytest.raises(RunFailed) as caught:
            await run.result()
    assert (caught.value.type, caught.value.text, caught.value.category) == ("", "by hand", "")
    assert caught.value.__cause__ is None
