"""`ff send`, `ff facts`: send a run a message, wait for its reply, and read its facts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli.commands.executions import IdArgument, document_text, result_document
from flowfabric.cli.output import JsonOption, TimeoutOption, format_instant, print_json, print_table
from flowfabric.cli.stores import StoreOrServerOption, run_on_execution

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.model.gate import Fact, Reply

POLL_MS = 1000
EXIT_REFUSED = 1
EXIT_NOT_ANSWERED = 5


def send(
    execution_id: IdArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the message.")],
    value: Annotated[str, typer.Argument(metavar="VALUE", help="The value to send, as JSON.")] = "null",
    wait: Annotated[bool, typer.Option("--wait", help="Ask: wait for the reply, and print it.")] = False,
    timeout: TimeoutOption = None,
    by: Annotated[str, typer.Option(help="The sender.")] = "ff send",
    key: Annotated[
        str | None,
        typer.Option(help="The same key is the same message; with --wait, it has the same reply."),
    ] = None,
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """Send a message to an execution. With --wait, print the reply.

    The exit code is 0 if it was sent, or answered; 1 if it was refused, and 5 if there is no reply.
    """
    from flowfabric.cli.commands.signals import make_message, parse_json
    from flowfabric.engine.types import Accepted

    payload, waits = parse_json(value), wait or timeout is not None

    async def deliver(engine: EngineAPI, full_id: str) -> Any:
        message = make_message(engine, full_id, name, payload, by, key)
        return await _ask(engine, message, timeout) if waits else await engine.send_message(message)

    answer = run_on_execution(store, execution_id, deliver)
    if waits:
        _print_reply(answer, json=json)
    elif json:
        print_json({"message_id": answer.signal_id if isinstance(answer, Accepted) else None})
    else:
        typer.echo("✓ sent" if isinstance(answer, Accepted) else "✓ sent before, and delivered once")


async def _ask(engine: EngineAPI, message: Any, timeout: str | None) -> Reply:
    from flowfabric.model.gate import ReplyState
    from flowfabric.sdk.answers import Deadline
    from flowfabric.sdk.durations import to_seconds

    deadline = Deadline(to_seconds(timeout), max_poll_ms=POLL_MS)
    reply = await engine.ask(message)
    while reply.state is ReplyState.OPEN and deadline.left_ms:
        reply = await engine.read_reply(message.execution_id, reply.message_id, max_wait_ms=deadline.left_ms)
    return reply


def _print_reply(reply: Reply, *, json: bool) -> None:
    from flowfabric.model.gate import ReplyState

    if json:
        document = result_document(reply.payload)
        print_json({"message_id": reply.message_id, "state": reply.state, "reason": reply.reason, "reply": document})
    elif reply.state is ReplyState.ANSWERED:
        typer.echo(document_text(result_document(reply.payload)) or "null")
    elif reply.state is ReplyState.REFUSED:
        typer.echo(f"ff: refused: {reply.reason}", err=True)
    else:
        why = reply.reason or "there is no reply yet; with --key the same question can be asked again"
        typer.echo(f"ff: not answered: {why}", err=True)
    codes = {ReplyState.ANSWERED: 0, ReplyState.REFUSED: EXIT_REFUSED}
    raise typer.Exit(codes.get(reply.state, EXIT_NOT_ANSWERED))


def facts(execution_id: IdArgument, store: StoreOrServerOption = None, json: JsonOption = False) -> None:
    """List what an execution shows. Its facts, with the last value of each."""

    async def load(engine: EngineAPI, full_id: str) -> list[Fact]:
        return await engine.list_facts(full_id)

    found = run_on_execution(store, execution_id, load)
    if json:
        print_json({"facts": [fact_document(fact) for fact in found]})
    elif not found:
        typer.echo("It shows no facts.")
    else:
        print_facts("", found)


def fact_document(fact: Fact) -> dict[str, Any]:
    """Return a fact for JSON output."""
    return {"name": fact.name, "number": fact.number, "set_at": fact.set_at, "value": result_document(fact.value)}


def print_facts(title: str, found: list[Fact]) -> None:
    """Print facts as a table."""
    rows = [
        (fact.name, document_text(result_document(fact.value)), fact.number, format_instant(fact.set_at))
        for fact in found
    ]
    print_table(title, ("fact", "value", "times set", "last set"), rows)
