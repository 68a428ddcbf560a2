"""What editors and type checkers infer: results, parameters, and invalid calls.

The functions below are checked and never run: `assert_type` has to hold, and each `type: ignore` has to be needed. mypy
checks them in `./dev check`, and pyright, which editors use, in the tests at the end.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, assert_type

import msgspec
import pydantic

from flowfabric import (
    AllOf,
    Approval,
    Context,
    Fabric,
    FlowRun,
    Key,
    Quorum,
    Reset,
    Retry,
    Run,
    Task,
    Votes,
    Won,
    current,
    step,
)
from flowfabric.model.states import PublicState
from flowfabric.sdk.flows import Node
from flowfabric.sdk.run import OutputFrame
from flowfabric.sdk.sync import SyncRun
from tests.postgres_install import ROOT

app = Fabric("sqlite:////nowhere/at/all.db")


class Mail(pydantic.BaseModel):
    to: str


class Receipt(pydantic.BaseModel):
    id: str


@app.task
async def send(ctx: Context, mail: Mail, copies: int = 1) -> Receipt:
    return Receipt(id=mail.to * copies)


@app.task(lane="mail", timeout="30s")
async def plain(mail: Mail) -> Receipt:
    return Receipt(id=mail.to)


@app.task
def blocking(ctx: Context, n: int) -> str:
    return str(n)


@app.task(isolation="process")
def counting(n: int) -> int:
    return n


async def fetch(n: int) -> list[str]:
    return [str(n)]


@step(retry=Retry(max=3), timeout="10s")
async def declared(card: str, cents: int) -> Receipt:
    return Receipt(id=card * cents)


def look(n: int) -> bytes:
    return bytes(n)


async def knows_runs(mail: Mail) -> None:
    run = await send.submit(mail, copies=2)
    assert_type(run, Run[Receipt])
    assert_type(await run.result(timeout=10), Receipt)
    assert_type(await plain.submit(mail), Run[Receipt])
    assert_type(await blocking.submit(3), Run[str])
    assert_type(await counting.submit(3), Run[int])
    assert_type(await send.options(delay="1h").submit(mail), Run[Receipt])
    assert_type(await plain.submit_many([mail]), list[Run[Receipt]])
    assert_type(await send.submit(mail, using=object()), Run[Receipt])
    assert_type(send.sync.submit(mail), SyncRun[Receipt])
    assert_type(send.sync.submit(mail).result(), Receipt)
    assert_type(send.sync.submit(mail, using=object()), SyncRun[Receipt])
    assert_type(run.sync.result(), Receipt)
    assert_type(send.run("id"), Run[Receipt])


@app.task(key=Key.single("owner"))
async def cart(ctx: Context, owner: str, items: int = 0) -> str:
    if ctx.should_continue:
        await ctx.continue_as_new(cart.s(owner, items))
    await ctx.continue_as_new(cart.s(items))  # type: ignore[arg-type]


@app.task(key=Key.batch("tenant", most=10, within="1s"))
async def embed(mails: list[Mail]) -> list[Receipt]:
    return []


async def knows_keys(mail: Mail) -> None:
    assert_type(await cart.at("7").result(), str)
    assert_type(await cart.at("7").or_start("ana").signal("add", 1), Run[str])
    assert_type(await cart.find("7"), Run[str] | None)
    assert_type(await embed.submit(mail), Run[Receipt])
    cart.at("7").or_start(7)  # type: ignore[arg-type]
    await embed.submit([mail])  # type: ignore[call-overload]


async def knows_plain_calls(mail: Mail) -> None:
    assert_type(await send(mail, copies=2), Receipt)
    assert_type(await plain(mail), Receipt)
    assert_type(blocking(3), str)
    await send("mail")  # type: ignore[arg-type]


async def knows_parameters(mail: Mail) -> None:
    await send.submit("mail")  # type: ignore[call-overload]
    await send.submit(mail, copies="two")  # type: ignore[call-overload]
    await send.submit()  # type: ignore[call-overload]
    await counting.submit("three")  # type: ignore[call-overload]
    send.s("mail")  # type: ignore[arg-type]
    send.sync.submit("mail")  # type: ignore[call-overload]


async def knows_contexts(ctx: Context) -> None:
    assert_type(await ctx.step(fetch, 1), list[str])
    assert_type(await ctx.step(look, 1), bytes)
    assert_type(ctx.sync.step(fetch, 1), list[str])
    assert_type(ctx.sync.step(look, 1), bytes)
    assert_type(await ctx.receive("steer", Mail), Mail)
    assert_type(await ctx.receive("steer", Mail, timeout="5m"), Mail | None)
    assert_type(ctx.sync.receive("steer", Mail, timeout="5m"), Mail | None)
    gate = assert_type(await ctx.approval("approve", Mail), Approval[Mail])
    assert_type(gate.links, list[str])
    votes = await gate
    assert_type(votes, Votes[Mail])
    assert_type([vote.value for vote in votes], list[Mail])
    assert_type(votes[0].value, Mail)
    assert_type(await ctx.step(plain, Mail(to="a")), Receipt)
    assert_type(await ctx.spawn(counting.s(1)), Run[int])
    assert_type(await ctx.spawn(counting, 1), Run[int])
    assert_type(ctx.sync.spawn(counting, 1), SyncRun[int])
    assert_type(await ctx.gather([counting.s(1)]), list[int])
    assert_type(await ctx.gather([counting.s(1)], join=AllOf()), list[int])
    assert_type(await ctx.gather([counting.s(1)], join=Quorum(1)), list[int | None])
    assert_type(await ctx.gather(counting.s(1), counting.s(2)), list[int])
    assert_type(await ctx.gather(counting.s(1), counting.s(2), join=Quorum(1)), list[int | None])
    assert_type(ctx.sync.gather([counting.s(1)]), list[int])
    assert_type(ctx.sync.gather([counting.s(1)], join=Quorum(1)), list[int | None])
    assert_type(await ctx.race(counting.s(1), counting.s(2)), int)
    assert_type(ctx.sync.race(counting.s(1)), int)
    of_two_kinds: object = await ctx.race(counting.s(1), blocking.s(2))  # The first may be of any of these types.
    print(of_two_kinds, await ctx.gather(counting.s(1), blocking.s(2)))
    assert_type(await ctx.now(), int)
    assert_type(ctx.stream("answer").text(), str)
    assert_type(current(), Context)


async def knows_steps(ctx: Context, mail: Mail) -> None:
    options = ctx.options(retry=Retry(max=5, only=(ConnectionError,)), timeout="10s", name="fetch", at_most_once=True)
    assert_type(await options.step(fetch, 1), list[str])
    assert_type(await ctx.options(key="k").step(look, n=1), bytes)
    assert_type(ctx.sync.options(name="look").step(look, 1), bytes)
    assert_type(await ctx.step(declared, "visa", cents=5), Receipt)
    assert_type(await ctx.race(one=fetch(1), two=fetch(2)), Won[list[str]])
    assert_type((await ctx.race(mail=ctx.receive("mail", Mail), late=ctx.sleep("1d"))).name, str)
    assert_type(ctx.sync.race(one=lambda: 1, two=lambda: 2), Won[int])
    await ctx.step(fetch, "one")  # type: ignore[call-overload]
    await ctx.step(fetch)  # type: ignore[call-overload]
    await ctx.step(look, 1, 2)  # type: ignore[call-overload]
    await ctx.step(declared, "visa")  # type: ignore[call-overload]
    await ctx.step(declared, "visa", cents="five")  # type: ignore[arg-type]
    await ctx.options(timeout="1s").step(look, "one")  # type: ignore[call-overload]
    ctx.sync.step(look, "one")  # type: ignore[call-overload]
    ctx.sync.options(timeout="1s").step(look, b"")  # type: ignore[call-overload]


async def types_of_a_run(run: Run[Receipt]) -> None:
    async for frame in run.stream("answer", after=None):
        assert_type(frame, OutputFrame | Reset)
    assert_type(await run.state(), PublicState)
    assert_type(await run.progress(), dict[str, Any])
    assert_type(await run.signal("steer", 1), bool)
    assert_type(run.sync.state(), PublicState)


async def knows_flows() -> None:
    flow = app.flow("nightly")
    node = flow.add(counting, 1)
    assert_type(node, Node[int])
    run = await flow.submit()
    assert_type(run, FlowRun)
    assert_type(run[node], Run[int])


def test_the_checked_functions_exist() -> None:
    checked: list[Any] = [
        knows_runs,
        knows_plain_calls,
        knows_parameters,
        knows_contexts,
        knows_steps,
        types_of_a_run,
        knows_flows,
    ]
    assert all(inspect.iscoroutinefunction(one) for one in checked)
    assert all(isinstance(one, Task) for one in (send, plain, blocking, counting))


def pyright(file: Path, folder: Path) -> list[tuple[int, str]]:
    """Return the line and rule of each error that pyright finds in a file."""
    settings = {
        "include": [str(file)],
        "extraPaths": [str(ROOT / "src"), str(ROOT)],
        "pythonVersion": "3.11",
        "typeCheckingMode": "standard",
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (folder / "pyrightconfig.json").write_bytes(msgspec.json.encode(settings))
    command = [sys.executable, "-m", "basedpyright", "--project", str(folder), "--outputjson"]
    done = subprocess.run([*command, "--pythonpath", sys.executable], capture_output=True, text=True, check=False)
    report = msgspec.json.decode(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1, done.stdout
    return [(one["range"]["start"]["line"] + 1, one["rule"]) for one in report["generalDiagnostics"]]


def test_pyright_agrees(tmp_path: Path) -> None:
    assert pyright(Path(__file__), tmp_path) == []


def test_pyright_reports_errors_in_invalid_code(tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text(
        "from typing import assert_type\n"
        "from tests.sdk.test_typing import Mail, send\n"
        "async def wrong(mail: Mail) -> None:\n"
        "    assert_type(await (await send.submit(mail)).result(), str)\n"
        "    await send.submit('mail')\n"
    )

    assert pyright(page, tmp_path) == [(4, "reportAssertTypeFailure"), (5, "reportArgumentType")]
