"""`ff ls`, `show`, `cancel`, `replay`: inspect executions and act on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli.output import (
    STATES,
    JsonOption,
    console,
    first_line,
    format_instant,
    format_progress,
    print_json,
    print_table,
)
from flowfabric.cli.stores import StoreOrServerOption, run_on_execution, run_on_store
from flowfabric.model.text import humanize

if TYPE_CHECKING:
    from flowfabric.engine_api import EngineAPI

IdArgument = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="The execution, as `ff ls` shows it, or a unique beginning: 86:019a9f3c.", show_default=False
    ),
]


RESERVED_TAG_PREFIX = "ff."  # of tags that the engine uses internally


def _states(incomplete: str) -> list[str]:
    return [state for state in STATES if state.startswith(incomplete)]


def ls(
    state: Annotated[
        str | None,
        typer.Option(help="Only executions in this public state.", autocompletion=_states, show_default=False),
    ] = None,
    lane: Annotated[str | None, typer.Option(help="Only executions of this lane.", show_default=False)] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Only executions of this namespace.", show_default=False)
    ] = None,
    tag: Annotated[
        str | None, typer.Option(metavar="KEY=VALUE", help="Only executions with this tag.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at a time.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Continue after this id.", show_default=False)] = None,
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """List executions, by id."""
    wanted = None if tag is None else parse_tag(tag, "--tag")

    async def search(engine: EngineAPI) -> Any:
        page = await engine.search_executions(
            public_state=state, lane_id=lane, namespace=namespace, tag=wanted, limit=limit, cursor=cursor
        )
        return page, await engine.read_kinds([item.execution_id for item in page.executions])

    page, kinds = run_on_store(store, search)
    if json:
        import msgspec

        listed = [
            {**msgspec.to_builtins(item), "execution_kind": kinds.get(item.execution_id)} for item in page.executions
        ]
        print_json({"executions": listed, "next_cursor": page.next_cursor})
        return
    if not page.executions:
        typer.echo("No executions." if cursor is None else "No more executions.")
        return
    print_table(
        "",
        ("execution", "task", "state", "lane", "attempts", "created", "why it waits"),
        [
            (
                item.execution_id,
                kinds.get(item.execution_id),
                item.public_state.value,
                item.lane_id,
                item.total_attempt_count,
                format_instant(item.created_at),
                first_line(item.blocking_detail)
                or humanize(item.blocking_reason.value if item.blocking_reason else ""),
            )
            for item in page.executions
        ],
    )
    if page.next_cursor:
        typer.echo(f"More: ff ls --cursor '{page.next_cursor}'")


def show(execution_id: IdArgument, store: StoreOrServerOption = None, json: JsonOption = False) -> None:
    """Show one execution. Its state, its attempts, and the history of its leases."""

    async def load_details(engine: EngineAPI, full_id: str) -> dict[str, Any]:
        from flowfabric.errors import NotFound

        snapshot = await engine.describe_execution(full_id)
        if snapshot is None:
            raise NotFound("execution", execution_id=full_id)
        from flowfabric.sdk.durable.output import progress_document

        return {
            "execution": snapshot,
            "execution_kind": (await engine.read_kinds([full_id])).get(full_id),
            "progress": progress_document(*await engine.read_progress(full_id)),
            "state_vector": await engine.read_state_vector(full_id),
            "attempts": await engine.attempt_history(full_id),
            "lease_history": await engine.lease_history(full_id),
            "result": result_document(await engine.get_execution_result(full_id)),
            "why": await _obstacle_sentence(engine, full_id),
        }

    details = run_on_execution(store, execution_id, load_details)
    if json:
        print_json(details)
        return
    _show_snapshot(details)
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
                first_line(item.failure_reason),
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


def _show_snapshot(details: dict[str, Any]) -> None:
    snapshot, result = details["execution"], details["result"]
    facts = {
        "task": details["execution_kind"],
        "state": snapshot.public_state.value,
        "lane": snapshot.lane_id,
        "namespace": snapshot.namespace,
        "created": format_instant(snapshot.created_at),
        "changed": format_instant(snapshot.last_mutation_at),
        "why": details["why"],
        "held by": snapshot.current_lease
        and f"{snapshot.current_lease.worker_instance_id} until {format_instant(snapshot.current_lease.expires_at)}",
        "progress": format_progress(details["progress"]),
        "tags": ", ".join(
            f"{key}={value}" for key, value in snapshot.tags.items() if not key.startswith(RESERVED_TAG_PREFIX)
        ),
        "failure": details["attempts"][-1].failure_reason if details["attempts"] else None,
        "result": result and (result.get("text") or f"{result['bytes']} bytes"),
    }
    out = console()
    out.print(snapshot.execution_id, style="bold", markup=False)
    for name, value in facts.items():
        if value:
            out.print(f"  {name:<10}" + str(value).strip().replace("\n", "\n" + " " * 12), markup=False)
    out.print()


def cancel(
    execution_id: IdArgument,
    reason: Annotated[str, typer.Option(help="Kept with the execution.")] = "cancelled by operator",
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """Cancel an execution, whatever it is doing. Cancelling it again changes nothing."""

    async def request_cancel(engine: EngineAPI, full_id: str) -> tuple[str, str]:
        return full_id, (await engine.cancel_execution(full_id, reason=reason)).public_state.value

    _print_state(*run_on_execution(store, execution_id, request_cancel), json=json)


def replay(execution_id: IdArgument, store: StoreOrServerOption = None, json: JsonOption = False) -> None:
    """Run an ended execution again, in a new life."""

    async def request_replay(engine: EngineAPI, full_id: str) -> tuple[str, str]:
        return full_id, (await engine.replay_execution(full_id)).public_state.value

    _print_state(*run_on_execution(store, execution_id, request_replay), json=json)


def _print_state(execution_id: str, state: str, *, json: bool) -> None:
    if json:
        print_json({"execution_id": execution_id, "public_state": state})
    else:
        typer.echo(f"✓ {execution_id} is {state}")


def parse_tag(text: str, option: str) -> tuple[str, str]:
    """Parse a `key=value` tag of the command line."""
    key, separator, value = text.partition("=")
    if not separator:
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint=option)
    return key, value


def result_document(result: bytes | None) -> dict[str, Any] | None:
    """Return the fields of a result: as text if it is text, else in base64."""
    if result is None:
        return None
    try:
        return {"bytes": len(result), "text": result.decode()}
    except UnicodeDecodeError:
        from base64 import b64encode

        return {"bytes": len(result), "base64": b64encode(result).decode()}
