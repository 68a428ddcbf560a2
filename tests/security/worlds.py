"""Servers on stores with the rows of two tenants: a new copy for each request, or a shared one."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server import ServerSettings, create_app
from flowfabric.settings import Secret
from flowfabric.stores.port import Store
from flowfabric.stores.sqlite import SQLiteStore
from tests.scenarios.checked_store import dump
from tests.security.client import Answer, Request, send
from tests.security.tenants import ROOT, UUID, Seed, Tenant, unknown_tenant

SIGNING_SECRET = "00112233445566778899aabbccddeeff" * 2
BINDINGS = ("own", "foreign", "unbound")
Rows = dict[str, list[Any]]


class Cast(msgspec.Struct, frozen=True):
    """The tenants, and a token of each scope and binding."""

    own: Tenant
    foreign: Tenant
    unknown: Tenant
    tokens: dict[str, str]
    ids: dict[str, frozenset[str]]  # ids of all rows, by namespace

    def token(self, scope: ApiScope | None, binding: str) -> str:
        """Return an Authorization header; routes without a scope accept any token."""
        return self.tokens[f"{(scope or ApiScope.READ).value} {binding}"]


class World:
    """A server on a store with the rows of both tenants."""

    def __init__(self, store: Store, cast: Cast | None = None) -> None:
        self.store = store
        self.engine = Engine(store)
        self.app = create_app(self.engine, ServerSettings(api_token=Secret(ROOT)))
        self.cast: Cast = cast  # type: ignore[assignment]

    async def fill(self) -> Cast:
        """Create all rows; the other tenant's come first, so that every feed has them before ours."""
        await self.engine.seed_waitpoint_hmac_secret("k1", SIGNING_SECRET)
        foreign = await Seed(self.app, "foreign", "zqforeignsecretxw").tenant()
        theirs = frozenset(UUID.findall(repr(await self.rows())))
        own = await Seed(self.app, "own", "zqownsecretofminexw").tenant()
        mine = frozenset(UUID.findall(repr(await self.rows()))) - theirs
        tokens = {}
        for scope, binding in product(ApiScope, BINDINGS):
            bound = None if binding == "unbound" else [binding]
            made = await self.engine.make_api_token("t", [scope], namespaces=bound)
            tokens[f"{scope.value} {binding}"] = f"Bearer {made.token}"
        shared = {own.budget, own.quota}
        ids = {"own": mine - shared, "foreign": theirs - shared}
        self.cast = Cast(own, foreign, await unknown_tenant(self.app, own), tokens, ids)
        return self.cast

    async def rows(self) -> Rows:
        """Return all rows and events, after the background work of the last request."""
        await self.engine.dispatcher.wait_idle()
        await self.engine.bulk_canceller.close()
        await self.engine.child_completions.drain()
        return await dump(self.store)

    async def close(self) -> None:
        await self.engine.close()
        await self.store.close()


class Stage:
    """Provides a world in the initial state for each request."""

    is_fresh = True
    sent_keys: frozenset[str] = frozenset()

    def __init__(self, template: Path, folder: Path, cast: Cast) -> None:
        self._template = template
        self._folder = folder
        self._count = 0
        self._world: World | None = None
        self.cast = cast
        self.before: Rows = {}
        self.after: Rows = {}

    async def world(self) -> World:
        """Return a world in the initial state."""
        if self._world is not None and self.after == self.before:
            return self._world
        await self.close()
        self._count += 1
        path = self._folder / f"{self._count}.db"
        shutil.copy(self._template, path)
        store = SQLiteStore(path, ManualClock())
        await store.open(migrate=False)
        self._world = World(store, self.cast)
        if not self.before:
            self.before = await self._world.rows()
        self.after = self.before
        return self._world

    async def send(self, request: Request, authorization: str | None) -> Answer:
        """Send a request to a world in the initial state; `after` has the resulting rows."""
        world = await self.world()
        answer = await send(world.app, request, authorization)
        self.after = await world.rows()
        return answer

    async def check_unchanged(self) -> None:
        """Check that all rows are in the initial state."""
        self.after = await (await self.world()).rows()
        assert self.after == self.before

    async def close(self) -> None:
        if self._world is not None:
            await self._world.close()
            self._world = None


class SharedStage(Stage):
    """One world for all requests, on any store; callers compare the rows themselves."""

    is_fresh = False

    def __init__(self, world: World) -> None:
        self.cast = world.cast
        self.before = self.after = {}
        self._shared = world

    async def world(self) -> World:
        return self._shared

    async def send(self, request: Request, authorization: str | None) -> Answer:
        key = self.cast.foreign.key
        if key in request.text:  # our tenant creates executions of its own with it, and its lists show them later
            self.sent_keys = frozenset({key})
        return await send(self._shared.app, request, authorization)

    async def check_unchanged(self) -> None:
        pass
