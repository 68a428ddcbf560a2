"""`ff admin`: commands for operators of a deployment."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli.output import JsonOption, exit_on_error, print_json, print_table, report
from flowfabric.cli.stores import StoreOption, check_is_store, resolve_store_url, run_on_store
from flowfabric.model.text import pluralize

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI


app = typer.Typer(help="Commands for operators of a deployment.", no_args_is_help=True)


def add_commands(app: typer.Typer, *, hidden: bool = False) -> None:
    """Add the commands to an application."""
    for name, command in (("partition-collisions", partition_collisions), ("rotate-secret", rotate_secret)):
        app.command(name, hidden=hidden)(command)


def rotate_secret(
    kid: Annotated[str, typer.Argument(metavar="KID", help="A name for the new key, as k2.")],
    secret_file: Annotated[
        typer.FileText | None,
        typer.Option(
            metavar="<path>",
            help="A file with the secret in hex, - is stdin; otherwise a random one.",
        ),
    ] = None,
    grace: Annotated[str, typer.Option(help="How long the previous key still verifies.")] = "24h",
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Sign tokens with a new key. Repeating the command with the same key and secret changes nothing."""
    import secrets

    secret = secrets.token_hex(32) if secret_file is None else secret_file.read().strip()

    async def rotate_keys(engine: EngineAPI) -> list[Any]:
        from flowfabric import Engine
        from flowfabric.errors import FabricError
        from flowfabric.sdk.durations import to_ms

        assert isinstance(engine, Engine), "check_is_store refuses servers"
        rotations = await engine.rotate_waitpoint_hmac_secret_all(kid, secret, to_ms(grace, "grace"))
        for refused in (rotation.result for rotation in rotations if isinstance(rotation.result, FabricError)):
            raise refused
        return rotations

    with exit_on_error():
        check_is_store(resolve_store_url(store), "ask it: POST /v1/admin/rotate-waitpoint-secret")
    rotations = run_on_store(store, rotate_keys)
    previous = getattr(rotations[0].result, "previous_kid", None)
    text = f"✓ {kid} signs" + (f"; {previous} verifies for {grace} more" if previous else "")
    report(json, text, rotated=len(rotations), failed=[], new_kid=kid, previous_kid=previous)


def partition_collisions(json: JsonOption = False) -> None:
    """List the lanes that share a partition.

    FF_LANES names the lanes and FF_FLOW_PARTITIONS is the number of partitions. The exit code is 2 if a lane name is
    invalid.
    """
    lanes, count = _configured_lanes()
    shared_partitions = _find_shared_partitions(lanes, count)
    colliding = sum(len(names) for names in shared_partitions.values())
    verdict = _verdict(colliding / len(lanes))
    if json:
        shared = [{"partition": number, "lanes": names} for number, names in shared_partitions.items()]
        print_json({"lanes": len(lanes), "partitions": count, "collisions": shared, "verdict": verdict})
        return
    if shared_partitions:
        print_table(
            "", ("partition", "lanes"), [(number, ", ".join(names)) for number, names in shared_partitions.items()]
        )
    some = f"{colliding} of {len(lanes)} lanes share a partition with another"
    finding = some if shared_partitions else "no lanes share a partition"
    typer.echo(f"{verdict}: {finding} ({pluralize(len(lanes), 'lane')}, {pluralize(count, 'partition')})")


def _configured_lanes() -> tuple[list[str], int]:
    from flowfabric.errors import InvalidInput
    from flowfabric.ids import parse_lane_id

    lanes = [name.strip() for name in os.environ.get("FF_LANES", "default").split(",") if name.strip()]
    try:
        text = os.environ.get("FF_FLOW_PARTITIONS", "256")
        if not text.strip().isdecimal():
            raise InvalidInput(f"FF_FLOW_PARTITIONS: {text!r} is not a whole number within 1..65535")
        count = int(text)
        if not 0 < count <= 65_535:
            raise InvalidInput(f"FF_FLOW_PARTITIONS: {count} is not within 1..65535")
        if not lanes:
            raise InvalidInput("FF_LANES: at least one lane is needed")
        if twice := sorted({lane for lane in lanes if lanes.count(lane) > 1}):
            raise InvalidInput(f"FF_LANES: named twice: {', '.join(twice)}")
        return [str(parse_lane_id(lane)) for lane in lanes], count
    except (InvalidInput, ValueError) as fault:
        typer.echo(f"ff: {fault}", err=True)
        raise typer.Exit(2) from None


def _find_shared_partitions(lanes: list[str], count: int) -> dict[int, list[str]]:
    """Return the partitions that several lanes share, with these lanes."""
    from flowfabric.ids import LaneId, PartitionCounts, solo_partition

    shared_partitions: dict[int, list[Any]] = {}
    for lane in lanes:
        shared_partitions.setdefault(solo_partition(LaneId(lane), PartitionCounts(flow=count)), []).append(lane)
    return {number: names for number, names in sorted(shared_partitions.items()) if len(names) > 1}


def _verdict(share: float) -> str:
    """Return the label for a share of colliding lanes."""
    if not share:
        return "Clean"
    return "Watch" if share < 0.05 else "Elevated" if share <= 0.15 else "Remediate"


add_commands(app)
