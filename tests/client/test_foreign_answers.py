"""Responses of proxies and firewalls: refused requests are retried, and no run ends because of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from flowfabric import Context, Fabric, errors
from flowfabric.client import RemoteEngine
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.durable import ParkResult
from flowfabric.engine.types import GateArgs
from flowfabric.model.gate import GateKind
from flowfabric.model.states import PublicState
from flowfabric.server import App, ServerSettings, create_app
from flowfabric.settings import Secret
from tests.client.test_lost import claimed
from tests.executions import create_request
from tests.sdk.conftest import running_worker, wait_until, wait_until_true

FOREIGN = (302, 400, 401, 403, 404, 407, 413, 415, 422, 431, 451)


class Proxy(httpx2.AsyncBaseTransport):
    """A proxy in front of the server, which answers some requests itself."""

    def __init__(self, app: App, token: str | None = None) -> None:
        self.app = app
        self.status = 403
        self.blocked: dict[str, float] = {}  # how many requests it answers itself, by the suffix of the path
        self.token = token  # replaces the token of the client, as a rotation does that the client does not know
        self.paths: list[str] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.paths.append(request.url.path)
        if self.token is not None:
            request.headers["authorization"] = f"Bearer {self.token}"
        for suffix, count in self.blocked.items():
            if count > 0 and request.url.path.endswith(suffix):
                self.blocked[suffix] -= 1
                page = b"<html>Request blocked. Your support id is 7.</html>"
                return httpx2.Response(self.status, headers={"content-type": "text/html"}, content=page)
        return await httpx2.ASGITransport(app=self.app).handle_async_request(request)


@pytest.fixture
def proxy(engine: Engine) -> Proxy:
    return Proxy(create_app(engine))


@pytest.fixture
async def remote(proxy: Proxy) -> AsyncIterator[RemoteEngine]:
    async with RemoteEngine("http://ff", transport=proxy, retry_for_s=5) as remote:
        yield remote


@pytest.mark.parametrize("status", FOREIGN)
async def test_a_completion_that_a_proxy_refuses_is_retried(remote: RemoteEngine, proxy: Proxy, status: int) -> None:
    work = await claimed(remote)
    proxy.status, proxy.blocked = status, {"/complete": 2}

    await remote.complete(work.handle, result=b"7", encoding="json")

    ended = await remote.await_end(work.execution_id)
    assert ended is not None
    assert (ended.outcome, ended.result) == ("success", b"7")


@pytest.mark.parametrize("status", FOREIGN)
async def test_a_foreign_answer_is_reported_with_its_status_and_an_unknown_outcome(
    remote: RemoteEngine, proxy: Proxy, status: int
) -> None:
    remote.transport.retry_for_s = 0.2
    proxy.status, proxy.blocked = status, {"/executions": 1000}

    with pytest.raises(errors.StoreUnavailable, match=f"answered {status}") as refused:
        await remote.create(create_request(remote.new_execution_id()))
    assert refused.value.in_doubt
    assert (refused.value.source is errors.StoreFault.AUTH) == (status in (401, 403, 407))


async def test_a_404_of_a_proxy_does_not_mean_that_an_execution_is_unknown(remote: RemoteEngine, proxy: Proxy) -> None:
    work = await claimed(remote)
    proxy.status, proxy.blocked = 404, {"/state": 1}
    assert await remote.read_execution_state(work.execution_id) is PublicState.ACTIVE


async def test_a_refused_retry_after_a_foreign_answer_counts_as_success_of_the_first_request(
    remote: RemoteEngine, proxy: Proxy, engine: Engine
) -> None:
    """A gateway that times out may have forwarded the request, so the retry may find its effect."""
    work = await claimed(remote)
    await remote.open_gate(work.handle, GateArgs(name="mail#0", kind=GateKind.MAILBOX, mailbox="mail"))
    await engine.park(work.handle, ("mail#0",))  # the request that the gateway forwarded
    proxy.status, proxy.blocked = 504, {"/park": 1}
    assert isinstance(await remote.park(work.handle, ("mail#0",)), ParkResult)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/leases/complete", b'{"handle": 3}', "invalid_input"),
        ("/v1/leases/complete", b"{", "invalid_input"),
        ("/v1/leases/complete", b" " * 40_000_000, "payload_too_large"),
        ("/v1/nowhere", b"{}", "route_not_found"),
    ],
)
async def test_a_refusal_of_the_server_itself_has_the_error_header(
    engine: Engine, path: str, body: bytes, kind: str
) -> None:
    transport = httpx2.ASGITransport(app=create_app(engine))
    async with httpx2.AsyncClient(transport=transport, base_url="http://ff") as client:
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code >= 400
    assert f'"code": "{kind}"' in answer.headers["x-ff-error"]


async def test_a_wrong_token_is_not_retried(engine: Engine) -> None:
    app = create_app(engine, ServerSettings(api_token=Secret("right")))
    async with RemoteEngine("http://ff", transport=Proxy(app), token=Secret("wrong"), retry_for_s=60) as remote:
        async with asyncio.timeout(5):
            with pytest.raises(errors.Unauthorized, match="Authorization"):
                await remote.create(create_request(remote.new_execution_id()))


async def test_requests_to_a_server_that_is_too_old_for_its_store_are_retried(
    remote: RemoteEngine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, calls, known = await claimed(remote), list[int](), engine.complete

    async def outdated(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) < 3:
            raise errors.SchemaTooNew(found=9, known=7)
        return await known(*args, **kwargs)

    monkeypatch.setattr(engine, "complete", outdated)
    await remote.complete(work.handle, result=b"7")
    remote.transport.retry_for_s = 0.0
    calls.clear()
    with pytest.raises(errors.StoreUnavailable, match="older release") as away:
        await remote.complete(work.handle, result=b"7")
    assert (away.value.in_doubt, away.value.retryable) == (False, True)


# -- workers --------------------------------------------------------------------------------------------------------


def app_behind(engine: RemoteEngine) -> Fabric:
    """Return an app whose worker sends all requests through the proxy, renewals as well."""
    engine.is_shared = False
    app = Fabric("http://ff")
    app.bind(engine)
    return app


@pytest.mark.parametrize("status", [400, 401, 403, 413, 422])
async def test_a_run_succeeds_although_a_proxy_refuses_its_completion_for_long(
    remote: RemoteEngine, proxy: Proxy, status: int
) -> None:
    remote.transport.retry_for_s = 0.1
    app, ran = app_behind(remote), list[int]()

    @app.task
    async def double(n: int) -> int:
        ran.append(n)
        proxy.status, proxy.blocked = status, {"/complete": 12}
        return n * 2

    async with running_worker(app):
        run = await double.submit(4)
        assert await run.result(20) == 8
    assert ran == [4]
    assert proxy.blocked["/complete"] == 0


async def test_a_run_fails_with_its_reason_although_a_proxy_refuses_the_report_for_long(
    remote: RemoteEngine, proxy: Proxy
) -> None:
    remote.transport.retry_for_s = 0.1
    app = app_behind(remote)

    @app.task
    async def wrong() -> None:
        proxy.blocked = {"/fail": 12}
        raise ValueError("its own reason")

    async with running_worker(app):
        with pytest.raises(Exception, match="its own reason"):
            await (await wrong.submit()).result(20)
    assert proxy.blocked["/fail"] == 0


async def test_a_run_is_claimed_again_if_its_completion_is_refused_until_the_lease_expires(
    remote: RemoteEngine, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "flowfabric.worker")
    remote.transport.retry_for_s = 0.1
    app, attempts = app_behind(remote), list[int]()

    @app.task
    async def double(ctx: Context, n: int) -> int:
        attempts.append(ctx.attempt)
        if len(attempts) == 1:
            proxy.blocked = {"/complete": 1e9, "/renew": 1e9}
        else:
            proxy.blocked.pop("/renew")
            await wait_until_true(lambda: any("before its lease expired" in one for one in caplog.messages))
            proxy.blocked = {}
        return n * 2

    async with running_worker(app, lease_ttl="1s"):
        run = await double.submit(4)
        assert await run.result(20) == 8
    assert attempts == [0, 1]
    assert sum("before its lease expired" in one for one in caplog.messages) == 1
    assert not any(one.exc_info for one in caplog.records)


async def test_a_run_survives_a_token_that_is_refused_for_a_while(engine: Engine) -> None:
    proxy = Proxy(create_app(engine, ServerSettings(api_token=Secret("right"))), token="right")
    async with RemoteEngine("http://ff", transport=proxy, token=Secret("any"), retry_for_s=0.1) as remote:
        app, ran = app_behind(remote), list[int]()

        @app.task
        async def double(n: int) -> int:
            ran.append(n)
            proxy.token = "not any more"
            return n * 2

        async with running_worker(app, lease_ttl="20s"):
            run = await double.submit(4)
            await wait_until_true(lambda: proxy.paths.count("/v1/leases/complete") >= 3)
            proxy.token = "right"
            assert await run.result(20) == 8
    assert ran == [4]


async def test_a_handler_that_is_not_authorized_is_delayed(remote: RemoteEngine, engine: Engine) -> None:
    app = app_behind(remote)

    @app.task
    async def asks() -> None:
        raise errors.Unauthorized("token lacks scope: operate")

    async with running_worker(app):
        run = await asks.submit()

        async def is_delayed() -> bool:
            return await engine.read_execution_state(run.id) is PublicState.DELAYED

        await wait_until(is_delayed)
    explained = str(await engine.explain(run.id))
    assert "token lacks scope" in explained
