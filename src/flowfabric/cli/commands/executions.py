"""`ff ls`, `show`, `cancel`, `replay`, `release`, `unpin`, `patches`: inspect executions and act on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli import bulk
from flowfabric.cli.children import load_children, print_children
from flowfabric.cli.output import (
    STATES,
    JsonOption,
    console,
    first_line,
    format_instant,
    format_progress,
    print_json,
    print_table,
    report,
)
from flowfabric.cli.stores import StoreOrServerOption, run_on_execution, run_on_store
from flowfabric.cli.where import WhereOption, parse_filters
from flowfabric.keyed_create import key_of
from flowfabric.model.text import humanize

if TYPE_CHECKING:
    from flowfabric.engine.types import ExecutionListing
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.model.failure import StoredFailure

MAX_SEARCHES = 50  # searches of one `ff ls`; each reads a limited number of rows

IdArgument = Annotated[
    str,
    typer.Argument(metavar="ID", help="The execution, as `ff ls` shows it, or a unique beginning: 86:019a9f3c."),
]


RESERVED_TAG_PREFIX = "ff."  # tags that the engine uses internally


def _states(incomplete: str) -> list[str]:
    return [state for state in STATES if state.startswith(incomplete)]


def ls(
    state: Annotated[
        str | None,
        typer.Option(help="Only executions in these public states.", autocompletion=_states),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only executions of this task.")] = None,
    lane: Annotated[str | None, typer.Option(help="Only executions of this lane.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Only executions of this namespace.")] = None,
    tag: Annotated[str | None, typer.Option(metavar="KEY=VALUE", help="Only executions with this tag.")] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Only executions created since: 15m, 2h, 2026-11-18."),
    ] = None,
    where: WhereOption = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at a time.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Continue after this page.")] = None,
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """List executions, newest first."""

    async def search(engine: EngineAPI) -> Any:
        filters = await parse_filters(
            engine, where, state=state, task=task, lane=lane, namespace=namespace, tag=tag, since=since
        )
        return await search_page(engine, filters, cursor, limit)

    found, next_cursor = run_on_store(store, search)
    if json:
        print_json({"executions": found, "next_cursor": next_cursor})
        return
    if not found:
        typer.echo("No executions." if cursor is None else "No more executions.")
    else:
        print_table(
            "",
            ("execution", "task", "state", "lane", "attempts", "created", "why"),
            [
                (
                    item.execution_id,
                    item.execution_kind,
                    item.public_state.value,
                    item.lane_id,
                    item.total_attempt_count,
                    format_instant(item.created_at),
                    _why(item),
                )
                for item in found
            ],
        )
    if next_cursor:
        typer.echo(f"More: ff ls --cursor '{next_cursor}'")


async def search_page(
    engine: EngineAPI, filters: dict[str, Any], cursor: str | None, limit: int
) -> tuple[list[ExecutionListing], str | None]:
    """Return a page of executions and the next cursor; a page is filled by several searches if matches are rare."""
    found: list[ExecutionListing] = []
    for _ in range(MAX_SEARCHES):
        page = await engine.search_executions(**filters, cursor=cursor, limit=limit - len(found))
        found += page.executions
        cursor = page.next_cursor
        if cursor is None or len(found) >= limit:
            break
    return found, cursor


def _why(item: ExecutionListing) -> str:
    """Return the first line of the failure of an ended execution, or what another one waits for."""
    if item.ended_at is not None:
        return item.reason or ""
    return first_line(item.blocking_detail) or humanize(item.blocking_reason.value if item.blocking_reason else "")


def show(execution_id: IdArgument, store: StoreOrServerOption = None, json: JsonOption = False) -> None:
    """Show one execution. Its state, input, steps, waits, children and attempts, and the history of its leases."""

    async def load_details(engine: EngineAPI, full_id: str) -> dict[str, Any]:
        from flowfabric.errors import NotFound

        snapshot = await engine.describe_execution(full_id)
        if snapshot is None:
            raise NotFound("execution", execution_id=full_id)
        from flowfabric.sdk.durable.output import progress_document
        from flowfabric.sdk.durable.timeline import read_timeline

        return {
            "execution": snapshot,
            "input": result_document((await engine.read_input(full_id)).payload),
            "timeline": await read_timeline(engine, full_id),
            "execution_kind": (await engine.read_kinds([full_id])).get(full_id),
            "progress": progress_document(*await engine.read_progress(full_id)),
            "state_vector": await engine.read_state_vector(full_id),
            "attempts": await engine.attempt_history(full_id),
            "lease_history": await engine.lease_history(full_id),
            "result": result_document(await engine.get_execution_result(full_id)),
            "why": await _obstacle_sentence(engine, full_id),
            "children": await load_children(engine, full_id),
            "facts": await engine.list_facts(full_id),
        }

    details = run_on_execution(store, execution_id, load_details)
    if json:
        from flowfabric.cli.commands.messages import fact_document

        print_json(details | {"facts": [fact_document(fact) for fact in details["facts"]]})
        return
    _show_snapshot(details)
    if details["timeline"]:
        print_table(
            "Operations",
            ("when", "what", "name", "state", "detail"),
            [
                (format_instant(entry.at), entry.kind, entry.name, entry.state, entry.detail)
                for entry in details["timeline"]
            ],
        )
    if details["facts"]:
        from flowfabric.cli.commands.messages import print_facts

        print_facts("Facts", details["facts"])
    print_children(details["children"])
    if not details["attempts"]:
        return
    print_table(
        "Attempts",
        ("#", "type", "state", "worker", "epoch", "started", "ended", "failure"),
        [
            (
                item.attempt_index,
                item.attempt_type.value,
                item.attempt_state.value,
                item.worker_instance_id,
                item.lease_epoch,
                format_instant(item.started_at),
                format_instant(item.ended_at),
                first_line(failure_text(item.error, item.failure_reason)),
            )
            for item in details["attempts"]
        ],
    )
    print_table(
        "Lease history",
        ("when", "event", "epoch", "worker", "reason"),
        [
            (
                format_instant(entry.ts),
                entry.event,
                entry.fields.get("lease_epoch", entry.fields.get("new_lease_epoch")),
                entry.fields.get("worker_instance_id", entry.fields.get("worker_id")),
                entry.fields.get("reason"),
            )
            for entry in details["lease_history"]
        ],
    )


async def _obstacle_sentence(engine: EngineAPI, execution_id: str) -> str | None:
    """Return why an execution is not running; None if it runs or has ended."""
    from flowfabric.model.obstacles import EndedObstacle, Running

    answer = await engine.explain(execution_id)
    return None if isinstance(answer.obstacle, EndedObstacle | Running) else answer.sentence


def find(
    task: Annotated[str, typer.Argument(help="The name of the task.")],
    key: Annotated[str, typer.Argument(help="The key, as in task.at(key).")],
    lane: Annotated[str, typer.Option("--lane", help="The task's own lane.")] = "default",
    namespace: Annotated[str, typer.Option("--namespace", help="The namespace of the app.")] = "default",
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """Print the execution that has a key.

    It is one that has not ended, or else the last one.
    """

    async def look_up(engine: EngineAPI) -> str:
        from flowfabric.errors import NotFound

        found = await engine.find_by_key(f"{task}|{key}", namespace=namespace, lane_id=lane)
        if found is None:
            raise NotFound("execution", f"{task} has no run under {key!r}")
        return found

    found = run_on_store(store, look_up)
    report(json, found, execution_id=found)


def _show_snapshot(details: dict[str, Any]) -> None:
    snapshot, result = details["execution"], details["result"]
    last = details["attempts"][-1] if details["attempts"] else None
    facts = {
        "task": details["execution_kind"],
        "input": document_text(details["input"]),
        "state": snapshot.public_state.value,
        "lane": snapshot.lane_id,
        "namespace": snapshot.namespace,
        "key": key_of(snapshot.idempotency_key),
        "life": snapshot.life and f"{snapshot.life}, since it continued as new",
        "created": format_instant(snapshot.created_at),
        "changed": format_instant(snapshot.last_mutation_at),
        "why": details["why"],
        "held by": snapshot.current_lease
        and f"{snapshot.current_lease.worker_instance_id} until {format_instant(snapshot.current_lease.expires_at)}",
        "progress": format_progress(details["progress"]),
        "unread": ", ".join(f"{name}: {count}" for name, count in (snapshot.unread or {}).items()),
        "tags": ", ".join(
            f"{key}={value}" for key, value in snapshot.tags.items() if not key.startswith(RESERVED_TAG_PREFIX)
        ),
        "failure": None if last is None else failure_text(last.error, last.failure_reason),
        "result": document_text(result),
    }
    out = console()
    out.print(snapshot.execution_id, style="bold", markup=False)
    for name, value in facts.items():
        if value:
            out.print(f"  {name:<10}" + str(value).strip().replace("\n", "\n" + " " * 12), markup=False)
    out.print()


OptionalIdArgument = Annotated[
    str | None,
    typer.Argument(metavar="ID", help="The execution, or a unique beginning; --where names many."),
]


def document_text(document: dict[str, Any] | None) -> str | None:
    """Return the text of a payload, or its size."""
    return (document.get("text") or f"{document['bytes']} bytes") if document else None


def cancel(
    execution_id: OptionalIdArgument = None,
    where: WhereOption = None,
    reason: Annotated[str, typer.Option(help="Kept with the execution.")] = "cancelled by operator",
    most: bulk.CeilingOption = bulk.DEFAULT_CEILING,
    dry_run: bulk.PreviewOption = False,
    yes: bulk.YesOption = False,
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """Cancel executions. One, whatever it is doing, or all that --where finds. Cancelling again changes nothing."""
    bulk.require_one(execution_id, where)
    if execution_id is None:
        bulk.run("cancel", where or [], store=store, reason=reason, most=most, yes=yes, dry_run=dry_run, json=json)
        return

    async def request_cancel(engine: EngineAPI, full_id: str) -> tuple[str, str]:
        return full_id, (await engine.cancel_execution(full_id, reason=reason)).public_state.value

    _print_state(*run_on_execution(store, execution_id, request_cancel), json=json)


def replay(
    execution_id: OptionalIdArgument = None,
    where: WhereOption = None,
    reason: Annotated[str, typer.Option(help="Kept with the bulk operation.")] = "replayed by operator",
    most: bulk.CeilingOption = bulk.DEFAULT_CEILING,
    dry_run: bulk.PreviewOption = False,
    yes: bulk.YesOption = False,
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """Run ended executions again. One, or all that --where finds, each in a new life."""
    bulk.require_one(execution_id, where)
    if execution_id is None:
        bulk.run("replay", where or [], store=store, reason=reason, most=most, yes=yes, dry_run=dry_run, json=json)
        return

    async def request_replay(engine: EngineAPI, full_id: str) -> tuple[str, str]:
        return full_id, (await engine.replay_execution(full_id)).public_state.value

    _print_state(*run_on_execution(store, execution_id, request_replay), json=json)


def release(
    execution_id: IdArgument,
    accept: Annotated[bool, typer.Option("--accept", help="Take the new way at the place where it is held.")] = False,
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """Let a held execution continue. It waits because the code of its task has changed."""

    async def request_release(engine: EngineAPI, full_id: str) -> tuple[str, bool]:
        return full_id, await engine.release_held(full_id, accept=accept, sender="operator")

    full_id, released = run_on_execution(store, execution_id, request_release)
    text = f"✓ {full_id} continues" if released else f"{full_id} is not held"
    report(json, text, execution_id=full_id, released=released)


def unpin(
    execution_id: IdArgument,
    to: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Only workers of this version continue it."),
    ] = None,
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """Unpin an execution. Workers of any version continue it, not only those of the one it began with."""

    async def request_unpin(engine: EngineAPI, full_id: str) -> tuple[str, bool]:
        return full_id, await engine.unpin(full_id, version=to)

    full_id, unpinned = run_on_execution(store, execution_id, request_unpin)
    text = f"✓ {full_id} is " + ("not pinned any more" if to is None else f"pinned to {to}")
    if not unpinned:
        text = f"{full_id} is not pinned" + ("" if to is None else " to another version")
    report(json, text, execution_id=full_id, unpinned=unpinned, version=to)


def patches(store: StoreOrServerOption = None, json: JsonOption = False) -> None:
    """List patches and pinned versions. With the executions that still need the old code.

    The `if` of a patch that is not listed can go, and so can the workers of a version that is not listed.
    """
    from collections import Counter

    async def count(engine: EngineAPI) -> tuple[Counter[str], Counter[str]]:
        old, pinned = Counter[str](), Counter[str]()
        cursor: str | None = None
        while True:
            page = await engine.count_old_ways(cursor=cursor)
            old.update(page.patches)
            pinned.update(page.pinned)
            cursor = page.next_cursor
            if cursor is None:
                return old, pinned

    old, pinned = run_on_store(store, count)
    if json:
        print_json({"patches": dict(sorted(old.items())), "pinned": dict(sorted(pinned.items()))})
        return
    if not old and not pinned:
        typer.echo("No execution goes the old way of a patch, and none is pinned.")
    if old:
        print_table("Patches", ("patch", "executions that go the old way"), sorted(old.items()))
    if pinned:
        print_table("Pinned", ("version", "executions"), sorted(pinned.items()))


def _print_state(execution_id: str, state: str, *, json: bool) -> None:
    report(json, f"✓ {execution_id} is {state}", execution_id=execution_id, public_state=state)


def failure_text(error: StoredFailure | None, reason: str | None) -> str | None:
    """Return type and text of the exception that ended an attempt, then where it was raised; else the reason."""
    if error is None:
        return reason
    _, _, frames = (reason or "").partition("\n")
    return f"{error.type}: {error.text}" + (f"\n{frames}" if frames else "")


def result_document(result: bytes | None) -> dict[str, Any] | None:
    """Return the fields of a result: as text if it is text, else in base64."""
    if result is None:
        return None
    try:
        return {"bytes": len(result), "text": result.decode()}
    except UnicodeDecodeError:
        from base64 import b64encode

        return {"bytes": len(result), "base64": b64encode(result).decode()}
