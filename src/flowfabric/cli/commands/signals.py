"""`ff signal`, `ff approvals`: send messages and answer approvals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli.output import JsonOption, console, format_instant, print_json, print_table
from flowfabric.cli.stores import StoreOrServerOption, resolve_store_url, run_on_execution, run_on_store

if TYPE_CHECKING:
    from flowfabric.engine.types import Approval, MessageArgs
    from flowfabric.engine_protocol import EngineAPI

LINK_PATH = "/v1/waitpoints/"
PAGE_SIZE = 100


def signal(
    target: Annotated[
        str,
        typer.Argument(metavar="ID|LINK", help="The execution, or the signed link of an approval."),
    ],
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The mailbox that `ctx.receive` reads; a link needs none."),
    ] = "",
    value: Annotated[str, typer.Option(help="The value to send, as JSON.")] = "null",
    by: Annotated[str, typer.Option(help="The sender.")] = "ff signal",
    key: Annotated[
        str | None,
        typer.Option(help="Idempotency key: a message with the same key is delivered once."),
    ] = None,
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """Send a message, or answer an approval with its link."""
    payload = parse_json(value)
    is_link = LINK_PATH in target
    if "://" in target and not is_link:
        raise typer.BadParameter(
            "this URL is no link of an approval; `ff approvals --links` prints those that are open"
        )
    if is_link == bool(name):
        raise typer.BadParameter(
            "a link names its approval: leave NAME out" if is_link else "NAME is missing: the mailbox of the message"
        )
    if is_link:
        answer = run_on_store(store, _vote(target, payload, by, key))
    else:
        answer = run_on_execution(
            store,
            target,
            lambda engine, full_id: engine.send_message(make_message(engine, full_id, name, payload, by, key)),
        )
    effect = answer.effect if hasattr(answer, "effect") else "duplicate"
    if json:
        print_json({"signal_id": getattr(answer, "signal_id", None), "effect": effect})
    elif effect == "duplicate":
        typer.echo("✓ sent before, and delivered once")
    elif not answer.is_useful:
        typer.echo("ff: not counted: this link has voted before, and the first vote counts", err=True)
        raise typer.Exit(1)
    else:
        typer.echo(_VOTED[effect == SATISFIED] if is_link else _SENT[effect == SATISFIED])


SATISFIED = "resume_condition_satisfied"
_VOTED = {True: "✓ voted: the approval is complete, and the run resumes", False: "✓ voted: more answers are needed"}
_SENT = {True: "✓ sent: the run waited for this, and resumes", False: "✓ sent: kept until the run receives it"}


def make_message(
    engine: EngineAPI, execution_id: str, name: str, payload: bytes, by: str, key: str | None
) -> MessageArgs:
    """Return a message to an execution."""
    from flowfabric.engine.types import MessageArgs

    return MessageArgs(
        execution_id=execution_id,
        mailbox=name,
        message_id=engine.minter.uuid(),
        payload=payload,
        payload_encoding="json",
        sender=by,
        idempotency_key=key,
    )


def _vote(link: str, payload: bytes, by: str, key: str | None) -> Any:
    async def vote(engine: EngineAPI) -> Any:
        from flowfabric.engine.types import SignalArgs, WaitpointToken

        execution_id, waitpoint_id, token = _parse_link(link)
        return await engine.deliver_signal(
            SignalArgs(
                execution_id=execution_id,
                waitpoint_id=waitpoint_id,
                signal_id=engine.minter.uuid(),
                signal_name="vote",
                waitpoint_token=WaitpointToken(token),
                signal_category="approval",
                source_type="person",
                source_identity=by,
                payload=payload,
                idempotency_key=key,
            )
        )

    return vote


def _parse_link(link: str) -> tuple[str, str, str]:
    """Parse the execution id, waitpoint id and token of a link."""
    from urllib.parse import parse_qs, unquote, urlsplit

    from flowfabric.errors import InvalidInput

    parts = urlsplit(link)
    names = unquote(parts.path).partition(LINK_PATH)[2].split("/")
    token = parse_qs(parts.query).get("token", [""])[0]
    if len(names) != 2 or not token:
        raise InvalidInput("link: not one of an approval; it ends with the waitpoint and ?token=…")
    return names[0], names[1], token


def parse_json(text: str) -> bytes:
    """Parse a value of the command line."""
    import msgspec

    try:
        return msgspec.json.encode(msgspec.json.decode(text.encode()))
    except msgspec.DecodeError as fault:
        raise typer.BadParameter(f"{fault}; a text needs quotes: '\"yes\"'", param_hint="--value") from None


def approvals(
    links: Annotated[
        bool, typer.Option("--links", help="Show the signed links, too: anyone who has one can vote.")
    ] = False,
    public_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where the links lead: FF_PUBLIC_URL, else the server that --store names.",
        ),
    ] = None,
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """List open approvals. The executions that ask, how many votes they have, and until when."""
    from flowfabric.connector import public_base_url

    base = public_base_url(resolve_store_url(store), public_url) if links else None
    approvals = run_on_store(store, lambda engine: _list_open(engine, base))
    if json:
        print_json({"approvals": approvals})
        return
    if not approvals:
        typer.echo("Nothing waits for an answer.")
        return
    print_table(
        "",
        ("execution", "asks for", "answers", "since", "until", "about"),
        [
            (
                item["execution_id"],
                item["name"],
                f"{item['answers']} of {item['need']}",
                format_instant(item["opened_at"]),
                format_instant(item["expires_at"]),
                item["about"],
            )
            for item in approvals
        ],
    )
    out = console()
    for item in approvals:
        for link in item["links"]:
            out.print(link, markup=False, soft_wrap=True)


async def _list_open(engine: EngineAPI, base_url: str | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = await engine.list_approvals(cursor=cursor, limit=PAGE_SIZE)
        found += [await _describe(engine, item, base_url) for item in page.approvals]
        cursor = page.next_cursor
        if cursor is None:
            return found


async def _describe(engine: EngineAPI, item: Approval, base_url: str | None) -> dict[str, Any]:
    return {
        "execution_id": item.execution_id,
        "execution_kind": item.execution_kind,
        "name": item.name,
        "answers": sum(approver.has_voted for approver in item.approvers),
        "need": item.need,
        "opened_at": item.opened_at,
        "expires_at": item.expires_at,
        "about": _about(item.shown),
        "links": [] if base_url is None else await _links(engine, item, base_url),
    }


def _about(shown: Any) -> str | None:
    import msgspec

    return None if shown is None else msgspec.json.encode(shown).decode()


async def _links(engine: EngineAPI, item: Approval, base_url: str) -> list[str]:
    from flowfabric.sdk.approvals import ApprovalLink

    links = []
    for approver in item.approvers:
        token = await engine.read_token_of(item.execution_id, approver.waitpoint_id)
        if token is not None:
            link = ApprovalLink.for_waitpoint(base_url, item.execution_id, approver.waitpoint_id, token.reveal())
            links.append(str(link))
    return links
