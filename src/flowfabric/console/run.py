"""One run: its obstacle, attempts, steps, waits, output, input and result."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import msgspec

from flowfabric import errors
from flowfabric.console import charts, show
from flowfabric.console.approvals import describe_answers
from flowfabric.console.budgets import BUDGET_MAILBOXES, budget_label, link_to_budget, needed_amount
from flowfabric.console.pages import SECURITY_HEADERS, Ui, View, page
from flowfabric.console.runs import FactRow, RunRow, fact_row, run_row
from flowfabric.engine.operations.pages import HistoryEntry
from flowfabric.engine.types import SCHEDULE_KEY, Approval, ExecutionSnapshot
from flowfabric.model.answers.execution import AttemptView
from flowfabric.model.gate import Gate, GateMemo, StepMemo, StepState
from flowfabric.model.obstacles import Explanation
from flowfabric.model.states import AttemptRecordState
from flowfabric.model.view import view_of
from flowfabric.server.errors import not_found
from flowfabric.server.routing import OCTET_STREAM, Response

MAX_STEPS = 200
MAX_FRAMES = 500
FRAMES_PER_READ = 100
MAX_HISTORY = 100
MAX_CHILDREN = 50
MAX_FACTS = 100
STEP_SHOWN_CHARS = 2000
SHORT_CHARS = 200  # of a vote or a message
ENDED = frozenset({"completed", "failed", "cancelled", "expired", "skipped"})
_ATTEMPT_COLOURS = {
    AttemptRecordState.ENDED_SUCCESS: "ok",
    AttemptRecordState.ENDED_FAILURE: "bad",
    AttemptRecordState.ENDED_CANCELLED: "off",
    AttemptRecordState.INTERRUPTED_RECLAIMED: "hold",
    AttemptRecordState.SUSPENDED: "hold",
}


_STEP_COLOURS = {
    StepState.DONE: "ok",
    StepState.FAILED: "bad",
    StepState.TRIES: "hold",
    StepState.BEGAN: "run",
    StepState.LEFT: "off",
}


class Why(msgspec.Struct, frozen=True):
    """The obstacle in words, the instants it depends on, and where to go to remove it."""

    kind: str
    parts: list[str | int]  # the sentence; numbers are instants
    colour: str
    links: list[tuple[str, str]] = []  # words and URL
    questions: list[str] = []  # open approvals: how many answers there are, and how many are needed


class StepRow(msgspec.Struct, frozen=True):
    name: str
    attempt: int
    started_at: int | None
    recorded_at: int
    state: StepState
    bytes: int
    result: str


class WaitRow(msgspec.Struct, frozen=True):
    """A wait of a durable function, open or closed."""

    name: str
    kind: str
    opened_at: int
    closed_at: int | None = None
    expires_at: int | None = None
    outcome: str = ""
    detail: str = ""
    votes: list[tuple[str, int, str]] = []  # voter, instant, value


class SpendRow(msgspec.Struct, frozen=True):
    """The spending of a run in one dimension of a budget."""

    budget_id: str
    namespace: str
    label: str
    dimension: str
    spent: int
    reserved: int


class Moment(msgspec.Struct, frozen=True):
    """A row of the timeline: an attempt, a step, a wait or a child. Without an end it is under way."""

    kind: str
    name: str
    begin: int
    end: int | None
    colour: str
    attempt: AttemptView | None = None
    step: StepRow | None = None
    wait: WaitRow | None = None
    child: RunRow | None = None

    @classmethod
    def of_attempt(cls, attempt: AttemptView) -> Moment:
        colour = _ATTEMPT_COLOURS.get(attempt.attempt_state, "run")
        end = attempt.ended_at or attempt.suspended_at
        name = str(attempt.attempt_index + 1)
        return cls("attempt", name, attempt.started_at, end, colour, attempt=attempt)

    @classmethod
    def of_step(cls, step: StepRow) -> Moment:
        """Return the row of a step; one without a start is a point at its record."""
        begin = step.recorded_at if step.started_at is None else min(step.started_at, step.recorded_at)
        return cls("step", step.name, begin, step.recorded_at, _STEP_COLOURS[step.state], step=step)

    @classmethod
    def of_wait(cls, wait: WaitRow) -> Moment:
        return cls("wait", wait.name, wait.opened_at, wait.closed_at, "hold", wait=wait)

    @classmethod
    def of_child(cls, child: RunRow) -> Moment:
        end = None if child.took_ms is None else child.created_at + child.took_ms
        return cls("child", child.task, child.created_at, end, show.STATES[child.state][2], child=child)


class RunPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "run.html"
    run: ExecutionSnapshot
    task: str
    priority: int
    started_at: int | None
    ended_at: int | None
    is_ended: bool
    why: Why
    attempts: list[AttemptView]
    steps: list[StepRow]
    more_steps: int
    waits: list[WaitRow]
    facts: list[FactRow]
    history: list[HistoryEntry]
    progress_pct: int | None
    progress_message: str | None
    input: show.Shown | None
    result: show.Shown | None
    failure: str
    output: list[str]
    output_attempt: int
    output_cursor: str
    more_output: bool
    tags: dict[str, str]
    parent_id: str | None
    schedule: str | None  # its name, if one created the run
    children: list[RunRow]
    spending: list[SpendRow]
    hides_payloads: bool

    @property
    def timeline(self) -> tuple[list[tuple[Moment, charts.Row]], list[int]]:
        """Attempts, steps, waits and children on one scale in the order in which they began, and the folded lengths."""
        moments = [
            *map(Moment.of_attempt, self.attempts),
            *map(Moment.of_step, self.steps),
            *map(Moment.of_wait, self.waits),
            *map(Moment.of_child, self.children),
        ]
        now = max([self.run.last_mutation_at, *(each.end or each.begin for each in moments)])
        moments.sort(key=lambda each: each.begin)
        rows, folds = charts.waterfall(
            [
                charts.Bar(
                    each.name,
                    each.begin,
                    now if each.end is None else max(each.begin, each.end),
                    each.colour,
                    is_idle=each.wait is not None,
                    is_whole=each.attempt is not None,
                )
                for each in moments
            ]
        )
        return list(zip(moments, rows, strict=True)), folds


async def _schedule_of(ui: Ui, run: ExecutionSnapshot) -> str | None:
    """Return the name of the schedule that created a run; its runs have it as their parent."""
    if run.parent_id is None:
        return None
    policy = (await ui.engine.read_input(run.execution_id)).policy or {}
    found = policy.get(SCHEDULE_KEY)
    return None if found is None else str(found["name"])


@page("/runs/{id}")
async def show_run(ui: Ui) -> RunPage:
    """Show a run."""
    execution_id = await ui.execution_id()
    engine = ui.engine
    run, info = await asyncio.gather(engine.describe_execution(execution_id), engine.read_execution_info(execution_id))
    if run is None or info is None:
        raise errors.NotFound("execution", execution_id=execution_id)
    attempts, steps, waits, leases, explanation = await asyncio.gather(
        engine.attempt_history(execution_id),
        engine.read_steps(execution_id),
        engine.read_waits(execution_id),
        engine.lease_history(execution_id),
        engine.explain(execution_id),
    )
    context, result, progress, children, facts = await asyncio.gather(
        engine.read_execution_context(execution_id),
        engine.get_execution_result(execution_id),
        engine.read_progress(execution_id),
        engine.list_children(execution_id, limit=MAX_CHILDREN),
        engine.list_facts(execution_id),
    )
    schedule = await _schedule_of(ui, run)
    asked: dict[str, Approval] = {}
    if any(gate.waitpoints for gate in waits.open.values()):
        asked = {each.gate: each for each in (await engine.list_approvals(execution_id=execution_id)).approvals}
    attempt_index = _output_attempt(ui, info.current_attempt_index)
    after = ui.request.query_param("after") or "0-0"
    output, cursor, more_output = await _read_output(ui, execution_id, attempt_index, after)
    ordered = _without_superseded(steps)
    tags = {key: value for key, value in run.tags.items() if not key.startswith("ff.")}
    is_ended = run.public_state.value in ENDED
    failure = next((each.failure_reason for each in reversed(attempts) if each.failure_reason), "") or ""
    return RunPage(
        title=info.execution_kind,
        about=f"run:{execution_id}",
        run=msgspec.structs.replace(run, tags=tags),
        task=info.execution_kind,
        priority=info.priority,
        started_at=info.started_at,
        ended_at=info.completed_at,
        is_ended=is_ended,
        why=await explain_in_words(ui, run, explanation, list(asked.values())),
        attempts=attempts,
        steps=[_step_row(ui, step) for step in ordered[-MAX_STEPS:]],
        more_steps=max(0, len(ordered) - MAX_STEPS),
        waits=[_open_wait(ui, name, gate, asked.get(name)) for name, gate in waits.open.items()]
        + [await _closed_wait(ui, memo) for memo in sorted(waits.memos.values(), key=lambda memo: memo.closed_at)],
        facts=[fact_row(ui, fact) for fact in facts[:MAX_FACTS]],
        history=leases[-MAX_HISTORY:],
        progress_pct=progress[0],
        progress_message=progress[1],
        input=ui.payload("input", context.input_payload),
        result=ui.payload("result", result),
        failure="" if run.public_state == "completed" else show.visible(failure[: show.MAX_SHOWN_BYTES]),
        output=output,
        output_attempt=attempt_index,
        output_cursor=cursor,
        more_output=more_output,
        tags=tags,
        parent_id=run.parent_id if schedule is None else None,
        schedule=schedule,
        children=[run_row(child) for child in children.executions],
        spending=await _spending(ui, execution_id),
        hides_payloads=ui.request.app.settings.hide_payloads or ui.request.app.redact is not None,
    )


async def _spending(ui: Ui, execution_id: str) -> list[SpendRow]:
    """Return what a run has spent, with the names of its budgets."""
    found = await ui.engine.read_spending(execution_id)
    budgets = {(each.namespace, each.budget_id) for each in found}
    labels = {key: budget_label(await ui.engine.get_budget_status(key[1], namespace=key[0])) for key in sorted(budgets)}
    return [view_of(SpendRow, each, label=labels[each.namespace, each.budget_id], spent=each.amount) for each in found]


def _output_attempt(ui: Ui, current: int) -> int:
    text = ui.request.query_param("attempt") or ""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else current


async def _read_output(ui: Ui, execution_id: str, attempt: int, after: str) -> tuple[list[str], str, bool]:
    """Return lines of output after a cursor, as many as a page shows; the cursor of the last one; if there are more."""
    lines, shown = list[str](), 0
    while len(lines) < MAX_FRAMES:
        found = (await ui.engine.tail_stream(execution_id, attempt, after, 0, FRAMES_PER_READ)).frames
        for frame in found:
            line = ui.payload_text("output", frame.fields.get("payload", "").encode())
            shown += len(line)
            if lines and shown > show.MAX_SHOWN_BYTES:
                return lines, after, True
            lines.append(line)
            after = frame.id
        if len(found) < FRAMES_PER_READ:
            return lines, after, False
    return lines, after, True


async def explain_in_words(
    ui: Ui, run: ExecutionSnapshot, explanation: Explanation, asked: list[Approval] | None = None
) -> Why:
    """Return the obstacle with the way out."""
    obstacle = explanation.obstacle
    links: list[tuple[str, str]] = []
    match type(obstacle).__name__:
        case "NoWorker" | "NoCapableWorker" | "Pinned" | "Queued" | "LeaseLost":
            links.append((f"workers of lane {run.lane_id}", ui.url("/lanes", run.lane_id, namespace=run.namespace)))
        case "Running":
            worker = obstacle.worker_instance_id  # type: ignore[attr-defined]
            links.append((f"worker {worker}", ui.url("/workers", worker, namespace=run.namespace)))
        case "BudgetExhausted":
            links += await link_to_budget(ui, run, obstacle.budget_id)  # type: ignore[attr-defined]
        case "QuotaFull":
            quota = obstacle.quota_policy_id  # type: ignore[attr-defined]
            links.append(("who has its slots", ui.url("/budgets", namespace=run.namespace) + f"#q{quota}"))
        case "SuspendedObstacle" if asked:
            links.append(("answer it", ui.url("/approvals") + f"#a{show.short_id(run.execution_id)}"))
        case "Dependencies":
            needed = obstacle.execution_ids[:5]  # type: ignore[attr-defined]
            links += [(f"…{show.short_id(each)}", ui.url(f"/runs/{each}")) for each in needed]
            if run.flow_id is not None:
                links.append(("its flow", ui.url(f"/flows/{run.flow_id}")))
    colour = show.STATES[run.public_state][2]
    kind = type(obstacle).__name__.removesuffix("Obstacle")
    return Why(kind, explanation.parts, colour, links, [describe_answers(approval) for approval in asked or []])


def _without_superseded(steps: list[StepMemo]) -> list[StepMemo]:
    """Leave out tries and starts of steps that have ended, and counts of facts, which are shown with their values."""
    ended = {(step.step, step.occurrence) for step in steps if step.state in (StepState.DONE, StepState.FAILED)}
    return [
        step
        for step in steps
        if step.state is not StepState.FACT
        and (step.state not in (StepState.TRIES, StepState.BEGAN) or (step.step, step.occurrence) not in ended)
    ]


def _step_row(ui: Ui, step: StepMemo) -> StepRow:
    name = step.step if not step.occurrence else f"{step.step} #{step.occurrence + 1}"
    text = ui.payload_text("step", step.result, STEP_SHOWN_CHARS)
    return StepRow(name, step.attempt_index, step.started_at, step.recorded_at, step.state, len(step.result), text)


def gate_label(name: str) -> str:
    """Return the name of a gate for people: `approval:deploy#0` becomes `deploy`."""
    text = name.removeprefix("in:")
    return (text.partition(":")[2] or text).rpartition("#")[0] or name


def _open_wait(ui: Ui, name: str, gate: Gate, approval: Approval | None) -> WaitRow:
    detail, votes = " or ".join(gate.receives), list[tuple[str, int, str]]()
    if detail.startswith(BUDGET_MAILBOXES):
        detail = needed_amount(detail)
    elif gate.children:
        detail = f"{gate.need or len(gate.children)} of {len(gate.children)} children"
    elif approval is not None:
        detail = describe_answers(approval).partition(": ")[2]
        votes = [
            (vote.by or "unknown", vote.at, ui.payload_text("vote", vote.payload, SHORT_CHARS))
            for vote in approval.votes
        ]
    return WaitRow(
        gate_label(name), gate.kind.value, gate.opened_at, expires_at=gate.expires_at, detail=detail, votes=votes
    )


async def _closed_wait(ui: Ui, memo: GateMemo) -> WaitRow:
    votes = [
        (vote.source_identity or "unknown", vote.accepted_at, ui.payload_text("vote", vote.payload, SHORT_CHARS))
        for vote in await ui.engine.read_votes(memo)
    ]
    detail = (
        f"{memo.sender or 'somebody'}: {ui.payload_text('message', memo.payload, SHORT_CHARS)}"
        if memo.message_id
        else ""
    )
    return WaitRow(
        gate_label(memo.gate), memo.kind.value, memo.opened_at, memo.closed_at, None, memo.ended_as.value, detail, votes
    )


# ---------------------------------------------------------------------------------------------------------------
# Downloads


@page("/runs/{id}/payload/{kind}")
async def download_payload(ui: Ui) -> Response:
    """Return the input or the result as a file."""
    execution_id, kind = await ui.execution_id(), ui.request.path_params[1]
    if ui.request.app.settings.hide_payloads or ui.request.app.redact is not None:
        raise not_found("payloads are not shown by this server")
    data: bytes | None
    match kind:
        case "input":
            data = (await ui.engine.read_execution_context(execution_id)).input_payload
        case "result":
            data = await ui.engine.get_execution_result(execution_id)
        case _:
            data = None
    if data is None:
        raise not_found("there is no such payload")
    name = f"{show.short_id(execution_id)}-{kind}"
    disposition = ("content-disposition", f'attachment; filename="{name}.bin"')
    return Response(200, data, OCTET_STREAM, (disposition, *SECURITY_HEADERS))
