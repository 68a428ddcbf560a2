"""`ff admin`: commands for operators of a deployment."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli.output import JsonOption, exit_on_error, print_json, print_table
from flowfabric.cli.stores import StoreOption, check_is_store, resolve_store_url, run_on_store
from flowfabric.model.text import pluralize

if TYPE_CHECKING:
    from flowfabric.engine_api import EngineAPI


def add_to(app: typer.Typer) -> None:
    """Add the commands to the application."""
    admin = typer.Typer(help="For whoever plans or keeps a deployment.", no_args_is_help=True)
    for name, command in (("partition-collisions", partition_collisions), ("rotate-secret", rotate_secret)):
        admin.command(name)(command)
        app.command(name, hidden=True)(command)  # understood without `admin`, too
    app.add_typer(admin, name="admin")


def rotate_secret(
    kid: Annotated[str, typer.Argument(metavar="KID", help="A name for the new key, as k2.")],
    secret_file: Annotated[
        typer.FileText | None,
        typer.Option(
            metavar="<path>",
            help="A file with the secret in hex, - is stdin; otherwise a random one.",
            show_default=False,
        ),
    ] = None,
    grace: Annotated[str, typer.Option(help="How long the key before still verifies.")] = "24h",
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Let another key sign the tokens. The same key and secret again change nothing."""
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
    before = getattr(rotations[0].result, "previous_kid", None)
    if json:
        print_json({"rotated": len(rotations), "failed": [], "new_kid": kid, "previous_kid": before})
    else:
        typer.echo(f"✓ {kid} signs" + (f"; {before} verifies for {grace} more" if before else ""))


def partition_collisions(json: JsonOption = False) -> None:
    """Tell which lanes share a partition.

    FF_LANES names the lanes and FF_FLOW_PARTITIONS says how many partitions there are. The exit code is 2 when a name
    is none.
    """
    lanes, count = _configured()
    shared_partitions = _shared(lanes, count)
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
    sharing = f"{colliding} of {len(lanes)} lanes share a partition with another"
    said = sharing if shared_partitions else "no lanes share a partition"
    typer.echo(f"{verdict}: {said} ({pluralize(len(lanes), 'lane')}, {pluralize(count, 'partition')})")


def _configured() -> tuple[list[str], int]:
    from flowfabric.errors import InvalidInput
    from flowfabric.ids import parse_lane_id

    lanes = [name.strip() for name in os.environ.get("FF_LANES", "default").split(",") if name.strip()]
    try:
        given = os.environ.get("FF_FLOW_PARTITIONS", "256")
        if not given.strip().isdecimal():
            raise InvalidInput(f"FF_FLOW_PARTITIONS: {given!r} is not a whole number within 1..65535")
        count = int(given)
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


def _shared(lanes: list[str], count: int) -> dict[int, list[str]]:
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
