"""`ff explain`, `ff tail`: explain why an execution is not running, and follow its output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli.commands.executions import IdArgument
from flowfabric.cli.output import JsonOption, console, format_progress, print_json, print_json_line
from flowfabric.cli.stores import StoreOrServerOption, run_on_execution

if TYPE_CHECKING:
    from flowfabric.engine.operations.pages import ExecutionOutcome
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.model.obstacles import Explanation

BLOCK_MS = 1000  # how long one poll waits for a frame before progress and outcome are polled


def explain(execution_id: IdArgument, store: StoreOrServerOption = None, json: JsonOption = False) -> None:
    """Explain why an execution is not running. Prints the obstacle and its facts."""
    from flowfabric.api.encoding import variant_name

    answer = run_on_execution(store, execution_id, lambda engine, full_id: engine.explain(full_id))
    facts = _facts(answer)
    if json:
        print_json(
            {
                "execution_id": answer.execution_id,
                "public_state": answer.public_state,
                "obstacle": variant_name(type(answer.obstacle)),
                "facts": facts,
                "sentence": answer.sentence,
                "remedies": answer.obstacle.remedies(answer.execution_id),
            }
        )
        return
    out = console()
    out.print(f"{answer.execution_id} is {answer.public_state.value}.", style="bold", markup=False)
    out.print(answer.sentence, markup=False)
    for remedy in answer.obstacle.remedies(answer.execution_id):
        out.print(f"  → {remedy}", markup=False, soft_wrap=True)


def _facts(answer: Explanation) -> dict[str, Any]:
    import msgspec

    return {name: msgspec.to_builtins(value) for name, value in msgspec.structs.asdict(answer.obstacle).items()}


def tail(
    execution_id: IdArgument,
    name: Annotated[str | None, typer.Option(help="Only the stream of this name; otherwise all.")] = None,
    follow: Annotated[bool, typer.Option(help="Wait for more until it has ended.")] = True,
    store: StoreOrServerOption = None,
    json: JsonOption = False,
    json_lines: Annotated[
        bool, typer.Option("--json-lines", help="Print one JSON document a line instead, while it runs.")
    ] = False,
) -> None:
    """Print the output of an execution while it runs.

    Progress is printed, too. The exit code is 1 if the execution does not succeed.

    With --json everything is one document, printed at the end.
    """
    documents: list[dict[str, Any]] = []
    emit = documents.append if json else print_json_line if json_lines else None

    async def follow_output(engine: EngineAPI, full_id: str) -> tuple[str, ExecutionOutcome | None]:
        return full_id, await _Tail(engine, full_id, name, emit).run(follow=follow)

    full_id, ended = run_on_execution(store, execution_id, follow_output)
    if json:
        _print_document(full_id, documents, ended)
    if ended is None:
        return
    succeeded = ended.outcome.value == "success"
    reason = _reason(ended)
    if json_lines and not json:
        print_json_line({"ended": ended.outcome.value, "reason": reason})
    elif not json:
        typer.echo(f"· {ended.outcome.value}" + (f": {reason.splitlines()[0]}" if reason else ""), err=True)
    if not succeeded:
        raise typer.Exit(1)


def _reason(ended: ExecutionOutcome) -> str | None:
    return None if ended.outcome.value == "success" else ended.reason  # a success keeps an earlier attempt's reason


def _print_document(execution_id: str, documents: list[dict[str, Any]], ended: ExecutionOutcome | None) -> None:
    """Print all frames, the last progress and the outcome as one document."""
    print_json(
        {
            "execution_id": execution_id,
            "frames": [document for document in documents if "text" in document],
            "progress": next((document["progress"] for document in reversed(documents) if "progress" in document), {}),
            "ended": None if ended is None else ended.outcome.value,
            "reason": None if ended is None else _reason(ended),
        }
    )


class ObstacleWatcher:
    """Reports why an awaited execution is not running, once per obstacle."""

    def __init__(self, engine: EngineAPI, execution_id: str) -> None:
        self._engine = engine
        self._id = execution_id
        self._last: type | None = None

    async def next_change(self) -> str | None:
        """Return the obstacle as a sentence; None if it has not changed or there is none."""
        from flowfabric.model.obstacles import EndedObstacle, Running

        answer = await self._engine.explain(self._id)
        before, self._last = self._last, type(answer.obstacle)
        return None if self._last in (before, EndedObstacle, Running) else answer.sentence


class _Tail:
    """Follows one execution from attempt to attempt."""

    def __init__(
        self, engine: EngineAPI, execution_id: str, name: str | None, emit: Callable[[dict[str, Any]], object] | None
    ) -> None:
        """Follow an execution. `emit` receives JSON documents; without it, text is printed."""
        self._engine = engine
        self._id = execution_id
        self._name = name
        self._emit = emit
        self._attempt = 0
        self._after = "0-0"
        self._progress: dict[str, Any] = {}
        self._mid_line = False
        self._obstacles = ObstacleWatcher(engine, execution_id)

    async def run(self, *, follow: bool) -> ExecutionOutcome | None:
        """Print output until the end; return the outcome if there is one."""
        ended = await self._engine.await_end(self._id)
        while True:
            wait_ms = BLOCK_MS if follow and ended is None else 0
            page = await self._engine.tail_stream(self._id, self._attempt, self._after, wait_ms, 1000)
            for frame in page.frames:
                self._after = frame.id
                self._print(frame.fields)
            await self._print_progress()
            if page.frames:
                continue
            latest = await self._engine.read_current_attempt_index(self._id)
            if latest > self._attempt:
                self._reset(latest)
            elif ended is not None or not follow:
                if self._mid_line:
                    typer.echo()
                return ended
            elif page.closed_at is not None:  # this attempt writes no more: wait for the end or the next attempt
                ended = await self._engine.await_end(self._id, max_wait_ms=BLOCK_MS)
            else:
                ended = await self._engine.await_end(self._id)
            if follow and ended is None:
                await self._print_obstacle()

    async def _print_obstacle(self) -> None:
        if self._emit is None and (obstacle := await self._obstacles.next_change()):
            self._print_note(obstacle)

    def _print(self, fields: Mapping[str, str]) -> None:
        from flowfabric.sdk.run import frame_text

        kind = fields.get("frame_type", "")
        if self._name is not None and kind != self._name:
            return
        text = frame_text(fields)
        if self._emit is not None:
            self._emit({"attempt": self._attempt, "name": kind, "at": self._after, "text": text})
            return
        typer.echo(text, nl=False)
        self._mid_line = sys.stdout.isatty() and bool(text) and not text.endswith("\n")

    def _reset(self, attempt: int) -> None:
        self._attempt, self._after = attempt, "0-0"
        if self._emit is not None:
            self._emit({"attempt": attempt, "reset": True})
        else:
            self._print_note(f"attempt {attempt} starts from the beginning")

    async def _print_progress(self) -> None:
        from flowfabric.sdk.durable.output import progress_document

        progress = progress_document(*await self._engine.read_progress(self._id))
        if progress in (self._progress, {}):
            return
        self._progress = progress
        if self._emit is not None:
            self._emit({"attempt": self._attempt, "progress": progress})
        else:
            self._print_note(format_progress(progress))

    def _print_note(self, words: str) -> None:
        if self._mid_line:
            typer.echo()
            self._mid_line = False
        typer.echo(f"· {words}", err=True)
