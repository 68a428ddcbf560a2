"""`ff result`: print the result of an execution."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli.commands.executions import IdArgument, failure_text, result_document
from flowfabric.cli.commands.tail import ObstacleWatcher
from flowfabric.cli.output import JsonOption, TimeoutOption, print_json
from flowfabric.cli.stores import StoreOrServerOption, run_on_execution

if TYPE_CHECKING:
    from flowfabric.engine.operations.pages import ExecutionOutcome
    from flowfabric.engine_protocol import EngineAPI

EXIT_CODES = {"success": 0, "failed": 1, "cancelled": 3, "expired": 4, "skipped": 4}
EXIT_NOT_ENDED = 5
POLL_MS = 1000


def result(
    execution_id: IdArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it has ended.")] = False,
    timeout: TimeoutOption = None,
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """Print the result of an execution.

    The exit code is 0 if it succeeded, 1 if it failed, 3 if it was cancelled, 4 if it expired or was skipped, 5 if it
    has not ended.
    """

    async def wait_for_outcome(engine: EngineAPI, full_id: str) -> tuple[str, ExecutionOutcome | None, str]:
        from flowfabric.sdk.durations import to_seconds

        limit_s = 0 if timeout is None and not wait else to_seconds(timeout)
        end = await _wait_for_end(engine, full_id, limit_s, show_obstacles=not json)
        why = "" if end is not None else (await engine.explain(full_id)).sentence
        return full_id, end, why

    full_id, end, why = run_on_execution(store, execution_id, wait_for_outcome)
    outcome = None if end is None else end.outcome.value
    if json:
        print_json({"execution_id": full_id, "outcome": outcome, **_result_fields(end)})
    elif end is None:
        typer.echo(f"ff: {full_id} has not ended. {why}", err=True)
        if not wait:
            typer.echo("Hint: --wait waits for its end", err=True)
    elif outcome == "success":
        _print_bytes(end.result or b"")
    else:
        reason = failure_text(end.failure, end.reason)
        typer.echo(f"ff: {full_id} {_VERBS[end.outcome.value]}" + (f": {reason}" if reason else ""), err=True)
    raise typer.Exit(EXIT_NOT_ENDED if outcome is None else EXIT_CODES[outcome])


_VERBS = {"failed": "failed", "cancelled": "was cancelled", "expired": "expired", "skipped": "was skipped"}


async def _wait_for_end(
    engine: EngineAPI, execution_id: str, limit_s: float | None, *, show_obstacles: bool
) -> ExecutionOutcome | None:
    """Wait for the outcome, without a limit if it is None; meanwhile print why the execution is not running."""
    from flowfabric.sdk.answers import Deadline

    obstacles = ObstacleWatcher(engine, execution_id)
    deadline = Deadline(limit_s, max_poll_ms=POLL_MS)
    while True:
        end = await engine.await_end(execution_id, max_wait_ms=deadline.left_ms)
        if end is not None or not deadline.left_ms:
            return end
        if show_obstacles and (obstacle := await obstacles.next_change()):
            typer.echo(f"· {obstacle}", err=True)


def _result_fields(end: ExecutionOutcome | None) -> dict[str, Any]:
    if end is None:
        return {"result": None, "reason": None, "error": None}
    succeeded = end.outcome.value == "success"
    return {
        "result": result_document(end.result),
        "reason": None if succeeded else end.reason,
        "error": end.failure,
    }


def _print_bytes(result: bytes) -> None:
    """Write the raw bytes; add a newline on a terminal."""
    typer.echo(result, nl=sys.stdout.isatty() and not result.endswith(b"\n"))
