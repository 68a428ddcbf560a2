"""`ff submit`: create an execution, by a task of an app or directly."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli.output import JsonOption, exit_on_error, print_json
from flowfabric.cli.stores import StoreOrServerOption, run_on_store
from flowfabric.cli.where import parse_tag

if TYPE_CHECKING:
    from flowfabric import Run, Task
    from flowfabric.engine_protocol import EngineAPI


def submit(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:TASK",
            help="A task: its input is checked, and its lane, retries, capabilities and limits apply. Without a task, "
            "the options describe the execution.",
        ),
    ] = None,
    payload: Annotated[
        str | None,
        typer.Option(help="The input as text; for a task a JSON object of its parameters."),
    ] = None,
    payload_file: Annotated[Path | None, typer.Option(help="A file with the input as bytes; - is stdin.")] = None,
    key: Annotated[
        str | None,
        typer.Option(help="Idempotency key: the same key within 24 h returns the same run."),
    ] = None,
    lane: Annotated[
        str | None,
        typer.Option(help="The lane: `default`, or that of the task."),
    ] = None,
    priority: Annotated[int | None, typer.Option(help="0 to 9000, higher first: 0, or that of the task.")] = None,
    delay: Annotated[str | None, typer.Option(help='Start after this delay: "30s", "5m".')] = None,
    tag: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="May be repeated.")] = None,
    kind: Annotated[
        str | None, typer.Option(help="Without a task: the name of its handler, `task` by default.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Without a task: the policy, as JSON.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Without a task: the namespace, `default` by default.")] = None,
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """Create an execution and print its id."""
    if payload is not None and payload_file is not None:
        raise typer.BadParameter("give --payload or --payload-file, not both")
    payload_bytes = _payload(payload, payload_file)
    tags = dict(parse_tag(item, "--tag") for item in tag or ())
    if target is not None:
        for option, value in (("--kind", kind), ("--policy", policy), ("--namespace", namespace)):
            if value is not None:
                raise typer.BadParameter(f"the task defines this: leave {option} out", param_hint=option)
        options = {"key": key, "lane": lane, "priority": priority, "delay": delay, "tags": tags or None}
        execution_id, is_new = _submit_task(target, payload_bytes, options, store)
    else:
        terms = {"idempotency_key": key, "tags": tags, "policy": policy, "priority": priority or 0}
        terms |= {"execution_kind": kind or "task", "namespace": namespace or "default"}
        execution_id, is_new = _submit_directly(payload_bytes, lane or "default", delay, terms, store)
    if json:
        print_json({"execution_id": execution_id, "created": is_new})
        return
    typer.echo(execution_id)
    if not is_new:
        typer.echo("(an execution with the same key exists already)", err=True)


def _submit_task(target: str, payload_bytes: bytes, options: dict[str, Any], store: str | None) -> tuple[str, bool]:
    import asyncio

    from flowfabric.cli.locate import load_task

    async def submit_run(task: Task[..., Any]) -> Run[Any]:
        arguments = _arguments(task, payload_bytes)
        async with task.app:
            return await task.options(**options).submit(**arguments)

    with exit_on_error():
        task = load_task(target)
        if store is not None:
            task.app.url = store
        run = asyncio.run(submit_run(task))
    return run.id, run.created


def _arguments(task: Task[..., Any], payload_bytes: bytes) -> dict[str, Any]:
    """Return the arguments in the JSON; an unknown parameter is a usage error."""
    import msgspec

    from flowfabric.errors import InvalidInput

    known = task.signature.parameter_codecs
    try:
        names = msgspec.json.decode(payload_bytes or b"{}", type=dict[str, Any])
    except msgspec.DecodeError as fault:
        raise InvalidInput(f"--payload: {fault}; a task needs an object of its parameters") from None
    for name in names:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise InvalidInput(f"{name}: {task.name} has no such parameter; {has}")
    return task.signature.load(payload_bytes)


def _submit_directly(
    payload_bytes: bytes, lane: str, delay: str | None, terms: dict[str, Any], store: str | None
) -> tuple[str, bool]:
    async def create(engine: EngineAPI) -> Any:
        from flowfabric.keyed_create import create_with_fresh_id
        from flowfabric.sdk.durations import to_ms

        delay_until = None if delay is None else await engine.ping() + to_ms(delay, "delay")
        return await create_with_fresh_id(
            engine,
            lane,
            terms["idempotency_key"],
            lambda fresh: engine.create_execution(
                execution_id=fresh,
                lane_id=lane,
                input_payload=payload_bytes,
                creator_identity="ff submit",
                delay_until=delay_until,
                **terms,
            ),
        )

    answer = run_on_store(store, create)
    return answer.execution_id, hasattr(answer, "public_state")


def _payload(text: str | None, file: Path | None) -> bytes:
    if file is None:
        return (text or "").encode()
    if str(file) == "-":
        return typer.get_binary_stream("stdin").read()
    try:
        return file.read_bytes()
    except OSError as fault:
        raise typer.BadParameter(f"{file}: {fault.strerror}", param_hint="--payload-file") from None
