"""Every route, with every scope and every binding of a token, beside the rows of another tenant.

The cases come from the server's own table of routes. Rows of two tenants are made once and copied for each route; a
request that must change nothing is followed by a comparison of all rows of the store. What is expected:

* no token or a wrong one: 401, wherever a token is needed;
* a token without the scope of the route: 403, whatever it is bound to;
* a token bound to another namespace: the answer that is given for ids that name nothing, or one of the refusals that
  `docs/security.md` states (403 for a namespace by name, a conflict for an id that is in use). No row of the other
  tenant changes, and neither its texts nor its ids are told;
* a token of the namespace, or one that is bound to none: a success.
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
from flowfabric.model.api_token import ApiScope
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


def run_apart(make: Any) -> Any:
    """What a coroutine returns that runs in a loop of its own."""
    with ThreadPoolExecutor() as threads:
        return threads.submit(lambda: asyncio.run(make())).result()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Cast]:
    """A file with the rows of both tenants, which the tests copy."""
    path = tmp_path_factory.mktemp("matrix") / "template.db"

    async def made() -> Cast:
        store = SQLiteStore(path, ManualClock())
        await store.open(migrate=True)
        world = World(store)
        cast = await world.fill()
        await world.close()
        return cast

    return path, run_apart(made)


@pytest.fixture
async def stage(template: tuple[Path, Cast], tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(template[0], tmp_path, template[1])
    yield stage
    await stage.close()


# ---------------------------------------------------------------------------------------------------------------
# What must not happen


def check_secrets(
    answer: Answer, request: Request, victim: Tenant, ids: frozenset[str], *, tells_lanes: bool = False
) -> None:
    """No text of the victim's rows is told, and no id but those that the caller named."""
    assert victim.hides(request.text.replace(victim.handle, "")), "the example itself tells the secret"
    text = re.sub(r'lane="[^"]*"', "", answer.text) if tells_lanes else answer.text
    assert victim.hides(text), f"tells a text of {victim.namespace}: {text}"
    named = set(UUID.findall(request.text))
    if victim.handle in request.text:
        named |= set(UUID.findall(victim.active))
    told = ids.intersection(UUID.findall(answer.text)) - named
    assert not told, f"tells ids of {victim.namespace}: {answer.text}"


def check_rows(before: Rows, after: Rows, victim: Tenant, ids: frozenset[str]) -> None:
    """No row of the victim is gone, changed or new; a new row of the caller's may name ids that the caller knew."""
    for name in before:
        if before[name] == after[name]:
            continue
        old, new = ({repr(row): row for row in rows[name]} for rows in (before, after))
        gone = [text for text in old.keys() - new if not victim.hides(text) or ids.intersection(UUID.findall(text))]
        assert not gone, f"{name} of {victim.namespace} changed: {gone}"
        come = [text for text in new.keys() - old if not victim.hides(text) or is_owned(new[text], victim, ids)]
        assert not come, f"{name} of {victim.namespace} is new: {come}"


def is_owned(row: Any, victim: Tenant, ids: frozenset[str]) -> bool:
    """Whether a row belongs to a tenant: by its namespace, else by the id that its key begins with."""
    namespace = getattr(row, "namespace", None)
    if namespace is not None:
        return bool(namespace == victim.namespace)
    table = TABLE.get(type(row))
    about = repr(row) if table is None else str(getattr(row, table.key[0]))
    return bool(ids.intersection(UUID.findall(about)))


def check_logs(records: list[logging.LogRecord], operation: Route, cast: Cast) -> None:
    """No log holds a token, a link, a handle or a text of a row; audited routes are in the audit log."""
    logged = [f"{record.getMessage()} {record.__dict__}" for record in records]
    secrets = [
        ROOT,
        *cast.tokens.values(),
        *(text for one in (cast.own, cast.foreign) for text in (one.link, one.handle)),
    ]
    told = [line for line in logged if any(secret.removeprefix("Bearer ") in line for secret in secrets)]
    assert not told, told
    assert [line for line in logged if not (cast.own.hides(line) and cast.foreign.hides(line))] == []
    audited = {record.getMessage() for record in records if record.name == "flowfabric.audit"}
    assert not operation.is_audited or audited == {operation.name}


def plain(answer: Answer) -> str:
    """An answer without the ids and the names that the caller gave."""
    return re.sub(r"i-(foreign|nowhere)", "<instance>", UUID.sub("<id>", answer.text))


def is_refusal_by_name(answer: Answer) -> bool:
    """Whether the namespace was refused by its name, or the route concerns all namespaces."""
    return answer.status == 403 and msgspec.json.decode(answer.body)["kind"] == "forbidden"


def is_about(request: Request, usual: Request, ids: frozenset[str]) -> bool:
    """Whether a request names rows of others: by their ids, or by words that the usual request does not have."""
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
            await refuse_strangers(stage, operation, make)
        if operation.scope is not None:
            await refuse_other_scopes(stage, operation, make)
        await hide_others(stage, operation, make)
        await spare_others(stage, operation, make)
        await serve_owner(stage, operation, make)
    check_logs(caplog.records, operation, stage.cast)


async def refuse_strangers(stage: Stage, operation: Route, make: Maker) -> None:
    """Without a good token nothing is told and nothing changes."""
    request = make(stage.cast.own, stage.cast.own).request(operation)
    world = await stage.world()
    methods = (operation.method, "HEAD") if operation.method == "GET" else (operation.method,)
    for method, shown in product(methods, (None, "Bearer wrong", "Bearer ", f"Basic {ROOT}")):
        answer = await send(world.app, msgspec.structs.replace(request, method=method), shown)
        assert answer.status == 401, f"{shown}: {answer.text}"
        assert stage.cast.own.hides(answer.text)
    await stage.check_unchanged()


async def refuse_other_scopes(stage: Stage, operation: Route, make: Maker) -> None:
    """A token of another scope is refused by that, before anything is looked up."""
    request = make(stage.cast.own, stage.cast.own).request(operation)
    world = await stage.world()
    for scope, binding in product(ApiScope, BINDINGS):
        if scope is not operation.scope:
            answer = await send(world.app, request, stage.cast.token(scope, binding))
            assert answer.status == 403, f"{scope} {binding}: {answer.text}"
            assert f"token lacks scope: {operation.scope}" in answer.text
    await stage.check_unchanged()


async def hide_others(stage: Stage, operation: Route, make: Maker) -> None:
    """What belongs to another tenant is answered like what does not exist."""
    own, foreign, unknown = stage.cast.own, stage.cast.foreign, stage.cast.unknown
    usual = make(own, own).request(operation)
    token = stage.cast.token(operation.scope, "own")
    pairs = [(foreign, own), (own, foreign)]
    if operation.needs_token:  # a link is good for whoever has it
        pairs.append((foreign, foreign))
    for first, second in pairs:
        example = make(first, second)
        request = example.request(operation)
        if not is_about(request, usual, stage.cast.ids["foreign"]):
            continue
        answer = await stage.ask(msgspec.structs.replace(request, until=request.until or "\n"), token)
        check_rows(stage.before, stage.after, foreign, stage.cast.ids["foreign"])
        check_secrets(answer, request, foreign, stage.cast.ids["foreign"])
        if is_refusal_by_name(answer):
            assert stage.after == stage.before
            continue
        if example.positional or (example.taken and example.taken in answer.text):
            continue
        if not stage.is_fresh:  # requests before this one have changed what it is about
            hidden = first is foreign and operation.subject in (Subject.EXECUTION, Subject.FLOW, Subject.HANDLE)
            assert not hidden or answer.status == 404, answer.text
            continue
        stand_ins = {foreign.namespace: unknown, own.namespace: own}
        other = make(stand_ins[first.namespace], stand_ins[second.namespace]).request(operation)
        expected = await stage.ask(other, token)
        told = f"of what another tenant has: {answer.text}; of what is not there: {expected.text}"
        assert plain(answer) == plain(expected), told


async def spare_others(stage: Stage, operation: Route, make: Maker) -> None:
    """The other tenant's token, shown for our rows, changes and tells nothing of them."""
    if operation.scope is None:
        return
    own = stage.cast.own
    request = make(own, own).request(operation)
    answer = await stage.ask(request, stage.cast.token(operation.scope, "foreign"))
    check_rows(stage.before, stage.after, own, stage.cast.ids["own"])
    check_secrets(answer, request, own, stage.cast.ids["own"])


async def serve_owner(stage: Stage, operation: Route, make: Maker) -> None:
    """The owner is served, and so is a token that is bound to no namespace; the other tenant's rows stay."""
    own, foreign = stage.cast.own, stage.cast.foreign
    example = make(own, own)
    request = example.request(operation)
    for binding in ("own", "unbound"):
        answer = await stage.ask(request, stage.cast.token(operation.scope, binding))
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
            await refuse_strangers(stage, operation, examples[0])
        if operation.scope is not None:
            await refuse_other_scopes(stage, operation, examples[0])
            for make in examples:
                await hide_others(stage, operation, make)
        check_rows(before, await world.rows(), foreign, world.cast.ids["foreign"])
