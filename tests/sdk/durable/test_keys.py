"""A key names a run: at every moment, on every store, one run has it, and a submit does what the task says."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from flowfabric import Context, Fabric, InvalidInput, Key, Keyed, KeyTaken, RunCancelled, RunFailed
from flowfabric.errors import NotFound
from flowfabric.sdk.keys.keyed_sync import SyncKeyed
from flowfabric.sdk.run import Run
from flowfabric.sdk.sync import SyncRun
from flowfabric.testing import World
from tests.sdk.conftest import running_worker, wait_until, wait_until_suspended
from tests.sdk.durable.crashes import Crashes

calls: Counter[str] = Counter()
WRONG: Any = 7
world_app = Fabric("sqlite:////nowhere/at/all.db")


@pytest.fixture(autouse=True)
def _clean() -> None:
    calls.clear()


def waiting(app: Fabric, key: Key | None) -> Any:
    @app.task(key=key)
    async def wait(ctx: Context, tenant: str, number: int = 0) -> int:
        calls["begun"] += 1
        await ctx.receive("go", bool)
        return number

    return wait


async def test_a_key_is_one_run_as_long_as_it_is_kept(app: Fabric) -> None:
    wait = waiting(app, Key("tenant"))
    async with running_worker(app):
        first = await wait.submit("a", 1)
        again, other = await wait.submit("a", 2), await wait.submit("b", 3)
        assert (first.created, again.created, other.created) == (True, False, True)
        assert again.id == first.id != other.id
        await first.signal("go", True)
        assert await first.result(20) == 1
        assert (await wait.submit("a", 4)).id == first.id


async def test_a_ttl_lets_one_run_through_in_its_time(app: Fabric) -> None:
    wait = waiting(app, Key("tenant", ttl="700ms"))
    first = await wait.submit("a")
    assert (await wait.submit("a")).id == first.id
    await first.cancel()
    assert (await wait.submit("a")).id == first.id

    async def is_free() -> bool:
        return bool((await wait.submit("a")).created)

    await wait_until(is_free)


async def test_a_key_is_free_the_moment_its_run_ended(app: Fabric) -> None:
    wait = waiting(app, Key.single("tenant"))
    async with running_worker(app):
        first = await wait.submit("a", 1)
        assert (await wait.submit("a", 2)).id == first.id
        await first.signal("go", True)
        assert await first.result(20) == 1
        second = await wait.submit("a", 3)
        assert second.created
        await second.signal("go", True)
        assert await second.result(20) == 3


async def test_a_taken_key_can_refuse(app: Fabric) -> None:
    wait = waiting(app, Key.single(lambda tenant: tenant.lower(), taken="refuse"))
    first = await wait.submit("A")
    with pytest.raises(KeyTaken) as taken:
        await wait.submit("a")
    assert isinstance(taken.value.run, Run)
    assert taken.value.run.id == first.id


async def test_one_of_many_concurrent_submits_creates_the_run(app: Fabric) -> None:
    wait = waiting(app, Key.single("tenant"))
    runs = await asyncio.gather(*(wait.submit("a", number) for number in range(20)))
    assert len({run.id for run in runs}) == 1
    assert sum(run.created for run in runs) == 1


async def test_the_latest_submit_takes_the_place_of_the_one_under_way(app: Fabric) -> None:
    wait = waiting(app, Key.latest("tenant"))
    async with running_worker(app):
        first = await wait.submit("a", 1)
        await wait_until_suspended(first)
        second = await wait.submit("a", 2)
        with pytest.raises(RunCancelled, match="took its place"):
            await first.result(20)
        await wait_until_suspended(second)
        await second.signal("go", True)
        assert await second.result(20) == 2
        assert (await wait.submit("a", 3)).created


async def test_the_last_input_of_a_debounced_run_counts(app: Fabric) -> None:
    @app.task(key=Key.debounce("tenant", "800ms"))
    async def index(tenant: str, number: int) -> int:
        calls[f"{tenant} {number}"] += 1
        return number

    async with running_worker(app):
        runs = [await index.submit("a", number) for number in range(5)]
        assert len({run.id for run in runs}) == 1
        explained = (await runs[0].explain()).sentence
        assert "debounced: it starts 0.8 s after the last submit" in explained
        assert await runs[0].result(20) == 4
        again = await index.submit("a", 9)
        assert again.created
    assert calls == Counter({"a 4": 1})


async def test_a_delay_does_not_go_with_a_key_that_says_when_the_run_starts(app: Fabric) -> None:
    @app.task(key=Key.debounce("tenant", "1s"))
    async def index(tenant: str) -> str:
        return tenant

    with pytest.raises(InvalidInput, match="leave the delay out"):
        await index.options(delay="1h").submit("a")
    assert await index.find("a") is None


async def test_a_debounced_run_starts_after_its_latest_time(app: Fabric) -> None:
    @app.task(key=Key.debounce("tenant", "10m", latest="10m"))
    async def index(tenant: str) -> str:
        return tenant

    run = await index.submit("a")
    first = (await run.describe()).delay_until
    await asyncio.sleep(0.05)
    await index.submit("a")
    assert (await run.describe()).delay_until == pytest.approx(first, abs=5)


@dataclass
class Doc:
    tenant: str
    text: str


def batching(app: Fabric, *, most: int = 3, within: str = "10m") -> Any:
    @app.task(key=Key.batch("tenant", most=most, within=within))
    async def index(docs: list[Doc]) -> list[str]:
        calls[",".join(doc.text for doc in docs)] += 1
        return [doc.text.upper() for doc in docs]

    return index


async def test_each_submit_of_a_batch_has_its_own_result(app: Fabric) -> None:
    index = batching(app)
    async with running_worker(app):
        runs = [await index.submit(Doc("t", text)) for text in "abcd"]
        assert [await run.result(20) for run in runs[:3]] == ["A", "B", "C"]
        assert len({run.id for run in runs}) == 2
        assert runs[3].created
        assert "1 of 3 so far" in (await runs[3].explain()).sentence
    assert calls == Counter({"a,b,c": 1})


async def test_a_batch_starts_when_its_time_is_over(app: Fabric) -> None:
    index = batching(app, most=100, within="500ms")
    async with running_worker(app):
        runs = await asyncio.gather(*(index.submit(Doc("t", text)) for text in "ab"))
        assert [await run.result(20) for run in runs] == ["A", "B"]
        assert len({run.id for run in runs}) == 1
        for batch in (index.run(runs[0].id), index.at("t")):
            assert await batch.result(20) == ["A", "B"]


async def test_a_batch_with_too_few_results_fails_for_all(app: Fabric) -> None:
    @app.task(key=Key.batch("tenant", most=2, within="10m"))
    async def index(docs: list[Doc]) -> list[str]:
        return ["one"]

    async with running_worker(app):
        runs = [await index.submit(Doc("t", text)) for text in "ab"]
        for run in runs:
            with pytest.raises(RunFailed, match="1 results for 2 inputs"):
                await run.result(20)


async def test_a_batch_whose_worker_dies_gets_its_inputs_again(app: Fabric) -> None:
    @app.task(key=Key.batch("tenant", most=2, within="10m"))
    async def index(ctx: Context, docs: list[Doc]) -> list[str]:
        texts = [doc.text for doc in docs]
        await ctx.options(name="write").step(calls.update, [",".join(texts)])
        return texts

    crashes = Crashes(app, [("step:write", "after_effect")])
    async with running_worker(app):
        runs = [await index.submit(Doc("t", text)) for text in "ab"]
        assert [await run.result(20) for run in runs] == ["a", "b"]
    assert not crashes.left
    assert calls == Counter({"a,b": 2})


def cart_of(app: Fabric) -> Any:
    @app.task
    async def cart(ctx: Context, owner: str) -> list[str]:
        items: list[str] = []
        while (item := await ctx.receive("add", str)) != "done":
            items.append(item)
        return [owner, *sorted(items)]

    return cart


async def test_an_actor_is_started_by_its_first_message(app: Fabric) -> None:
    cart = cart_of(app)
    assert await cart.find("cart-7") is None
    with pytest.raises(NotFound, match="has no run under 'cart-7'"):
        await cart.at("cart-7").signal("add", "milk")
    async with running_worker(app):
        first = await cart.at("cart-7").or_start("ana").signal("add", "milk")
        again = await cart.at("cart-7").or_start("bo").signal("add", "eggs")
        assert (first.created, again.created, first.id) == (True, False, again.id)
        await cart.at("cart-7").signal("add", "done")
        assert await cart.at("cart-7").result(20) == ["ana", "eggs", "milk"]
        found = await cart.find("cart-7")
        assert getattr(found, "id", None) == first.id
        third = await cart.at("cart-7").or_start("cy").signal("add", "done")
        assert (third.created, await third.result(20)) == (True, ["cy"])


async def test_or_start_from_many_is_one_run_and_every_message(app: Fabric) -> None:
    cart = cart_of(app)
    runs = await asyncio.gather(*(cart.at("c").or_start("ana").signal("add", str(n)) for n in range(10)))
    assert len({run.id for run in runs}) == 1
    await runs[0].signal("add", "done")
    async with running_worker(app):
        assert await runs[0].result(20) == ["ana", *sorted(map(str, range(10)))]


async def test_a_run_that_continues_as_new_keeps_its_key(app: Fabric) -> None:
    @app.task(key=Key.single("name"))
    async def poll(ctx: Context, name: str, life: int = 0) -> int:
        await ctx.receive("go", bool)
        if life < 1:
            await ctx.continue_as_new(name, life + 1)
        return ctx.life

    async with running_worker(app):
        run = await poll.submit("p")
        await poll.at("p").signal("go", True)
        await wait_until(lambda: has_life(run, 1))
        assert (await poll.submit("p")).id == run.id
        await poll.at("p").signal("go", True)
        assert await run.result(20) == 1


async def has_life(run: Run[Any], life: int) -> bool:
    return (await run.describe()).life == life


async def test_a_key_function_that_raises_submits_nothing(app: Fabric) -> None:
    @app.task(key=Key(lambda tenant: tenant["id"]))
    async def broken(tenant: str) -> None: ...

    with pytest.raises(InvalidInput, match="its function raised TypeError"):
        await broken.submit("a")


def test_a_key_that_no_call_has_is_refused_at_once(app: Fabric) -> None:
    with pytest.raises(InvalidInput, match="no parameter 'tenant'; its parameters: name"):

        @app.task(key=Key("tenant"))
        async def wrong(name: str) -> None: ...


@pytest.mark.parametrize("handler", ["no list", "two", "no result"])
def test_a_batch_needs_a_list_in_and_out(app: Fabric, handler: str) -> None:
    async def no_list(doc: str) -> list[str]:
        return [doc]

    async def two(docs: list[str], more: int) -> list[str]:
        return docs

    async def no_result(docs: list[str]) -> None: ...

    wrong: Any = {"no list": no_list, "two": two, "no result": no_result}[handler]
    with pytest.raises(InvalidInput, match=r"items: list\[T\]\) -> list\[R\]"):
        app.task(key=Key.batch(lambda docs: docs, most=2, within="1s"))(wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Key(WRONG),
        lambda: Key.single("a", taken=WRONG),
        lambda: Key.debounce("a", "5s", latest="1s"),
        lambda: Key.batch("a", most=0, within="1s"),
        lambda: Key.batch("a", most=10**6, within="1s"),
        lambda: Key("a", ttl="0s"),
    ],
)
def test_wrong_keys_are_refused(make: Any) -> None:
    with pytest.raises(InvalidInput):
        make()


def test_everything_that_a_run_can_do_can_be_done_at_a_key() -> None:
    own = {"id", "created", "task", "decode", "timeout_error"}
    public = {name for name in dir(Run) if not name.startswith("_")}
    assert public - own <= set(dir(Keyed))
    blocking = {name for name in dir(SyncRun) if not name.startswith("_")}
    assert blocking - own <= set(dir(SyncKeyed))


async def test_virtual_time_debounces() -> None:
    @world_app.task(key=Key.debounce("user", "5s", latest="12s"))
    async def index(user: str, version: int) -> int:
        calls["index"] += 1
        return version

    async with World(world_app) as world:
        run = await index.submit("ana", 0)
        for version in (1, 2):  # pushed to 9 s, and not to 13 s, but to 12 s
            await world.advance("4s")
            assert (await index.submit("ana", version)).id == run.id
        await world.advance("4s")
        assert await run.result() == 2
        assert calls["index"] == 1
        assert (await index.submit("ana", 9)).id != run.id


async def test_plain_code_uses_the_blocking_twins(app: Fabric) -> None:
    cart = cart_of(app)

    def shop() -> list[str]:
        first = cart.sync.at("c").or_start("ana").signal("add", "milk")
        assert cart.sync.find("c").id == cart.sync.at("c").run().id == first.id
        assert cart.sync.find("d") is None
        cart.sync.at("c").signal("add", "done")
        return list(cart.sync.at("c").result(20))

    async with running_worker(app):
        assert await asyncio.to_thread(shop) == ["ana", "milk"]


async def test_a_batch_is_no_child(app: Fabric) -> None:
    index = batching(app)

    @app.task
    async def parent(ctx: Context) -> str:
        with pytest.raises(InvalidInput, match="no child or node of a flow"):
            await ctx.spawn(index, Doc("t", "a"))
        return "refused"

    async with running_worker(app):
        assert await (await parent.submit()).result(20) == "refused"


async def test_or_start_wants_the_key_of_its_arguments(app: Fabric) -> None:
    wait = waiting(app, Key.single("tenant"))
    with pytest.raises(InvalidInput, match="have the key 'b', not 'a'"):
        await wait.at("a").or_start("b").run()
    run = await wait.at("a").or_start("a").run()
    assert (await wait.submit("a")).id == run.id
