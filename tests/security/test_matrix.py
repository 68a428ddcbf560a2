"""Every route with every scope and every binding of a token, on a store with rows of another tenant.

The cases added from the server's routes. Rows of two tenants are created once and copied for each route; after a
request that must change nothing, all rows of the store are compared. Expected are:

* no token or a wrong one: 401, wherever a token is needed;
* a token without the scope of the route: 403, whatever it is bound to;
* a token bound to another namespace: the response for ids that do not exist, or one of the refusals of
  `docs/security.md` (403 for a namespace by name, a conflict for an id in use). No row of the other tenant changes, and
  neither its texts nor its ids are revealed;
* a token of the namespace, or an unbound one: success.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server.routes import ROUTE_GROUPS
from flowfabric.server.routing import Route, Subject
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.port import Store
from flowfabric.stores.sqlite import SQLiteStore
from tests.security.client import Answer, Request, send
from tests.security.examples import EXAMPLES, Maker, examples_of
from tests.security.tenants import ROOT, UUID, Tenant, forms
from tests.security.worlds import BINDINGS, Cast, Rows, SharedStage, Stage, World

OPERATIONS = [operation for page in ROUTE_GROUPS for operation in page.entries]


def run_in_new_loop(make: Any) -> Any:
    """Run a coroutine function in a new event loop; return its result."""
    with ThreadPoolExecutor() as threads:
        return threads.submit(lambda: asyncio.run(make())).result()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Cast]:
    """A SQLite file with the rows of both tenants, which the tests copy."""
    path = tmp_path_factory.mktemp("matrix") / "template.db"

    async def made() -> Cast:
        store = SQLiteStore(path, ManualClock())
        await store.open(migrate=True)
        world = World(store)
        cast = await world.fill()
        await world.close()
        return cast

    return path, run_in_new_loop(made)


@pytest.fixture
async def stage(template: tuple[Path, Cast], tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(template[0], tmp_path, template[1])
    yield stage
    await stage.close()


# ---------------------------------------------------------------------------------------------------------------
# Checks


def check_secrets(
    answer: Answer, request: Request, victim: Tenant, ids: frozenset[str], *, tells_lanes: bool = False
) -> None:
    """Check that a response contains no text of the victim's rows, and no id but those in the request."""
    assert victim.hides(request.text.replace(victim.handle, "")), "the example itself contains the secret"
    text = re.sub(r'lane="[^"]*"', "", answer.text) if tells_lanes else answer.text
    assert victim.hides(text), f"reveals a text of {victim.namespace}: {text}"
    named = set(UUID.findall(request.text))
    if victim.handle in request.text:
        named |= set(UUID.findall(victim.active))
    revealed = ids.intersection(UUID.findall(answer.text)) - named
    assert not revealed, f"reveals ids of {victim.namespace}: {answer.text}"


def check_rows(before: Rows, after: Rows, victim: Tenant, ids: frozenset[str]) -> None:
    """Check that no row of the victim was deleted, changed or added; new rows of the caller may contain its ids."""
    for name in before:
        if before[name] == after[name]:
            continue
        old, new = ({repr(row): row for row in rows[name]} for rows in (before, after))
        removed = [text for text in old.keys() - new if not victim.hides(text) or ids.intersection(UUID.findall(text))]
        assert not removed, f"{name} of {victim.namespace} changed: {removed}"
        added = [text for text in new.keys() - old if not victim.hides(text) or is_owned(new[text], victim, ids)]
        assert not added, f"{name} of {victim.namespace} is new: {added}"


def is_owned(row: Any, victim: Tenant, ids: frozenset[str]) -> bool:
    """True if a row belongs to a tenant: by its namespace, else by the first column of its key."""
    namespace = getattr(row, "namespace", None)
    if namespace is not None:
        return bool(namespace == victim.namespace)
    table = TABLE.get(type(row))
    about = repr(row) if table is None else str(getattr(row, table.key[0]))
    return bool(ids.intersection(UUID.findall(about)))


def check_logs(records: list[logging.LogRecord], operation: Route, cast: Cast) -> None:
    """Check that no log contains a token, a link, a handle or a text of a row, and that audited routes are audited."""
    logged = [f"{record.getMessage()} {record.__dict__}" for record in records]
    secrets = [
        ROOT,
        *cast.tokens.values(),
        *(text for one in (cast.own, cast.foreign) for text in (one.link, one.handle)),
    ]
    leaks = [line for line in logged if any(secret.removeprefix("Bearer ") in line for secret in secrets)]
    assert not leaks, leaks
    assert [line for line in logged if not (cast.own.hides(line) and cast.foreign.hides(line))] == []
    audited = {record.getMessage() for record in records if record.name == "flowfabric.audit"}
    assert not operation.audit or audited == {operation.name}


def plain(answer: Answer) -> str:
    """Return a response without the ids and names of the request."""
    return re.sub(r"i-(foreign|nowhere)", "<instance>", UUID.sub("<id>", answer.text))


def is_refusal_by_name(answer: Answer) -> bool:
    """True if the namespace was refused by its name, or because the route concerns all namespaces."""
    return answer.status == 403 and msgspec.json.decode(answer.body)["kind"] == "forbidden"


def is_about(request: Request, usual: Request, ids: frozenset[str]) -> bool:
    """True if a request names rows of others: by their ids, or by other names than the usual request."""
    return bool(ids.intersection(UUID.findall(request.text))) or UUID.sub("", request.text) != UUID.sub("", usual.text)


# ---------------------------------------------------------------------------------------------------------------
# The cases


def test_every_route_has_an_example() -> None:
    known = {operation.name for operation in OPERATIONS}
    missing = sorted(known - {name.partition(":")[0] for name in EXAMPLES})
    left = sorted({name.partition(":")[0] for name in EXAMPLES} - known)

    assert not missing, (
        f"no example of {', '.join(missing)}: add a valid request to EXAMPLES in tests/security/examples.py, and the "
        "rows that it needs to tests/security/tenants.py"
    )
    assert not left, f"no route is called {', '.join(left)}: remove the example from tests/security/examples.py"
    assert len(known) == len(OPERATIONS), "two routes have handlers of the same name"


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
async def test_a_token_is_valid_for_its_scope_and_its_namespaces_only(
    stage: Stage, operation: Route, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="flowfabric")
    for make in examples_of(operation):
        if operation.needs_token:
            await check_unauthenticated(stage, operation, make)
        if operation.scope is not None:
            await check_other_scopes(stage, operation, make)
        await check_hidden(stage, operation, make)
        await check_foreign_token(stage, operation, make)
        await check_owner(stage, operation, make)
    check_logs(caplog.records, operation, stage.cast)


async def check_unauthenticated(stage: Stage, operation: Route, make: Maker) -> None:
    """Check that a request without a valid token is refused and changes nothing."""
    request = make(stage.cast.own, stage.cast.own).request(operation)
    world = await stage.world()
    methods = (operation.method, "HEAD") if operation.method == "GET" else (operation.method,)
    for method, shown in product(methods, (None, "Bearer wrong", "Bearer ", f"Basic {ROOT}")):
        answer = await send(world.app, msgspec.structs.replace(request, method=method), shown)
        assert answer.status == 401, f"{shown}: {answer.text}"
        assert stage.cast.own.hides(answer.text)
    await stage.check_unchanged()


async def check_other_scopes(stage: Stage, operation: Route, make: Maker) -> None:
    """Check that tokens of other scopes are refused before any lookup."""
    request = make(stage.cast.own, stage.cast.own).request(operation)
    world = await stage.world()
    for scope, binding in product(ApiScope, BINDINGS):
        if scope is not operation.scope:
            answer = await send(world.app, request, stage.cast.token(scope, binding))
            assert answer.status == 403, f"{scope} {binding}: {answer.text}"
            assert f"token lacks scope: {operation.scope}" in answer.text
    await stage.check_unchanged()


async def check_hidden(stage: Stage, operation: Route, make: Maker) -> None:
    """Check that the response for rows of another tenant is that for rows that do not exist."""
    own, foreign, unknown = stage.cast.own, stage.cast.foreign, stage.cast.unknown
    usual = make(own, own).request(operation)
    token = stage.cast.token(operation.scope, "own")
    pairs = [(foreign, own), (own, foreign)]
    if operation.needs_token:  # a signed link works for every caller
        pairs.append((foreign, foreign))
    for first, second in pairs:
        example = make(first, second)
        request = example.request(operation)
        if not is_about(request, usual, stage.cast.ids["foreign"]):
            continue
        answer = await stage.send(msgspec.structs.replace(request, until=request.until or "\n"), token)
        check_rows(stage.before, stage.after, foreign, stage.cast.ids["foreign"])
        check_secrets(answer, request, foreign, stage.cast.ids["foreign"] - stage.sent_keys)
        if is_refusal_by_name(answer):
            assert stage.after == stage.before
            continue
        if example.positional or (example.taken and example.taken in answer.text):
            continue
        if not stage.is_fresh:  # requests before this one have changed what it is about
            hidden = first is foreign and operation.subject in (Subject.EXECUTION, Subject.FLOW, Subject.HANDLE)
            assert not hidden or answer.status == 404, answer.text
            continue
        substitutes = {foreign.namespace: unknown, own.namespace: own}
        other = make(substitutes[first.namespace], substitutes[second.namespace]).request(operation)
        expected = await stage.send(other, token)
        difference = f"for rows of another tenant: {answer.text}; for unknown ids: {expected.text}"
        assert plain(answer) == plain(expected), difference


async def check_foreign_token(stage: Stage, operation: Route, make: Maker) -> None:
    """Check that the other tenant's token neither changes nor reveals our rows."""
    if operation.scope is None:
        return
    own = stage.cast.own
    request = make(own, own).request(operation)
    answer = await stage.send(request, stage.cast.token(operation.scope, "foreign"))
    check_rows(stage.before, stage.after, own, stage.cast.ids["own"])
    check_secrets(answer, request, own, stage.cast.ids["own"])


async def check_owner(stage: Stage, operation: Route, make: Maker) -> None:
    """Check that the owner and an unbound token succeed, and that the other tenant's rows do not change."""
    own, foreign = stage.cast.own, stage.cast.foreign
    example = make(own, own)
    request = example.request(operation)
    for binding in ("own", "unbound"):
        answer = await stage.send(request, stage.cast.token(operation.scope, binding))
        if binding == "own":
            check_rows(stage.before, stage.after, foreign, stage.cast.ids["foreign"])
            check_secrets(answer, request, foreign, stage.cast.ids["foreign"], tells_lanes=example.tells_lanes)
        concerns_all = operation.scope is not None and operation.subject is None
        if binding == "own" and concerns_all:
            assert is_refusal_by_name(answer), answer.text
            assert stage.after == stage.before
        elif example.works:
            assert answer.status in operation.responses, f"{binding}: the example does not work: {answer.text}"
            assert not example.shows or any(form in answer.text for form in forms(own.secret)), answer.text


# ---------------------------------------------------------------------------------------------------------------
# The other stores


@pytest.mark.parametrize("store", ["memory", "postgres"], indirect=True)
async def test_a_token_cannot_reach_rows_of_another_namespace_on_any_store(store: Store) -> None:
    world = World(store)
    await world.fill()
    stage, foreign = SharedStage(world), world.cast.foreign
    before = await world.rows()
    for operation in OPERATIONS:
        examples = examples_of(operation)
        if operation.needs_token:
            await check_unauthenticated(stage, operation, examples[0])
        if operation.scope is not None:
            await check_other_scopes(stage, operation, examples[0])
            for make in examples:
                await check_hidden(stage, operation, make)
        check_rows(before, await world.rows(), foreign, world.cast.ids["foreign"])
