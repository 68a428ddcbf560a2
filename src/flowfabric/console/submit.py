"""Submit a run, or one again with edited input: a form from the schema that workers report, or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from markupsafe import Markup

from flowfabric import errors, json_limits
from flowfabric.console.pages import Ui, View, action, page, parse_integer, parse_json
from flowfabric.keyed_create import create_with_fresh_id
from flowfabric.model.scheduling.worker import TaskEntry
from flowfabric.model.security.api_token import ApiScope
from flowfabric.model.security.owned_id import DEFAULT_NAMESPACE
from flowfabric.server import approval_form
from flowfabric.server.errors import bad_request
from flowfabric.server.request import path_execution_id


class SubmitPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "submit.html"
    execution_id: str
    task: str = ""
    lane: str = "default"
    namespace: str = DEFAULT_NAMESPACE
    priority: int = 0
    input: str = "{}"
    again: str = ""
    tasks: list[TaskEntry]
    schema: dict[str, Any] | None = None  # schema of the input; None asks for JSON
    has_schema: bool = False
    values: Any = None  # values that the form is filled with

    @property
    def fields(self) -> Markup:
        """The fields of the input."""
        return approval_form.render_form(self.schema or {}, self.values).fields


@page("/submit", scope=ApiScope.SUBMIT)
async def show_submit(ui: Ui) -> SubmitPage:
    """Show the form; with `again`, filled with the input of another run. With `mode=json` the input is JSON."""
    tasks = await _tasks(ui)
    name = ui.request.query_param("task") or ""
    known = next((task for task in tasks if task.name == name and task.namespace == ui.namespace), None)
    view = SubmitPage(
        title="Submit",
        execution_id=ui.new_id(),
        namespace=ui.namespace,
        tasks=tasks,
        task=name,
        lane="default" if known is None else known.lane,
    )
    again = ui.request.query_param("again")
    if again:
        view = await _again(ui, view, path_execution_id(again))
        known = next((task for task in tasks if task.name == view.task and task.namespace == view.namespace), None)
    schema = None if known is None else known.input_schema
    if schema is None:
        return view
    if ui.request.query_param("mode") == "json" or (again and not approval_form.can_show(schema, view.values)):
        return msgspec.structs.replace(view, has_schema=True)
    return msgspec.structs.replace(view, has_schema=True, schema=schema)


async def _tasks(ui: Ui) -> list[TaskEntry]:
    """Return the tasks that live workers run, in the namespaces that the caller sees."""
    return (await ui.engine.list_tasks(namespaces=ui.namespaces)).tasks


async def _again(ui: Ui, view: SubmitPage, execution_id: str) -> SubmitPage:
    await ui.request.require_execution_access(execution_id)
    run = await ui.engine.describe_execution(execution_id)
    if run is None:
        raise errors.NotFound("execution", execution_id=execution_id)
    context = await ui.engine.read_execution_context(execution_id)
    shown = ui.payload("input", context.input_payload)
    text = "{}" if shown is None or not shown.is_json or shown.is_cut else shown.text
    return msgspec.structs.replace(
        view,
        again=execution_id,
        task=context.execution_kind,
        lane=run.lane_id,
        namespace=run.namespace,
        priority=run.priority,
        input=text,
        values=_decode(text),
    )


def _decode(text: str) -> Any:
    try:
        return json_limits.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


@action("/submit", scope=ApiScope.SUBMIT)
async def submit_run(ui: Ui, fields: Mapping[str, str]) -> str:
    """Create a run; the same form sent twice is one run."""
    namespace = ui.request.resolve_namespace(fields.get("namespace") or None)
    task, lane = fields.get("task", "").strip(), fields.get("lane", "").strip() or "default"
    if not task:
        raise bad_request("task: missing")
    payload = await _input(ui, fields, namespace, task)
    priority = parse_integer("priority", fields.get("priority") or "0")
    key = f"console:{fields.get('execution_id', '')}"
    made = await create_with_fresh_id(
        ui.engine,
        lane,
        key,
        lambda fresh: ui.engine.create_execution(
            execution_id=fresh,
            namespace=namespace,
            lane_id=lane,
            execution_kind=task,
            input_payload=payload,
            payload_encoding="json",
            priority=priority,
            creator_identity=ui.name,
            idempotency_key=key,
        ),
    )
    return ui.url(f"/runs/{made.execution_id}")


async def _input(ui: Ui, fields: Mapping[str, str], namespace: str, task: str) -> bytes:
    """Return the input as JSON: from one field, or from the fields of the task's schema."""
    if "input" in fields:
        return parse_json("input", fields["input"])
    for known in await _tasks(ui):
        if (known.namespace, known.name) == (namespace, task) and known.input_schema is not None:
            try:
                return msgspec.json.encode(approval_form.parse_form(fields, known.input_schema))
            except approval_form.InvalidFormInput as wrong:
                raise bad_request(str(wrong)) from None
    raise bad_request("input: no live worker describes the parameters of this task any more; give them as JSON")
