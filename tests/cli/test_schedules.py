"""`ff schedules`: the life of a schedule from the command line, on a store and on a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.terminal import Terminal

APP = """
from flowfabric import Fabric

app = Fabric()


@app.task
async def report(region: str) -> str:
    return region
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module of an app with a task."""
    (tmp_path / "scheduled_shop.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    return "scheduled_shop:report"


def test_a_schedule_is_created_listed_paused_resumed_triggered_and_deleted(ff_or_server: Terminal, shop: str) -> None:
    ff = ff_or_server
    assert "No schedules in namespace default" in ff.stdout("schedules", "list")
    made = ff.stdout(
        *("schedules", "create", "tenant-7", shop, "--cron", "0 3 * * *", "--tz", "Europe/Berlin"),
        *("--payload", '{"region": "t7"}'),
    )
    assert "tenant-7 is in place." in made
    listed = ff.stdout("schedules", "list")
    assert "tenant-7" in listed
    assert "0 3 * * * Europe/Berlin" in listed

    assert "is paused." in ff.stdout("schedules", "pause", "tenant-7", "--note", "until the migration is done")
    shown = ff.stdout("schedules", "show", "tenant-7")
    assert "paused by person: until the migration is done" in shown
    assert "The next instants" in shown
    assert "was paused already" in ff.stdout("schedules", "pause", "tenant-7", "--note", "until the migration is done")
    assert ff.document("schedules", "resume", "tenant-7") == {"changed": True}
    run = ff.document("schedules", "trigger", "tenant-7")["execution_id"]
    described = ff.document("schedules", "show", "tenant-7")
    assert [one["execution_id"] for one in described["runs"]] == [run]
    assert len(described["next_instants"]) == 10

    done = ff.document("schedules", "backfill", "tenant-7", "2026-01-01", "2026-01-04", "--overlap", "allow")
    assert done == {"created": 3, "queued": 0, "skipped": 0, "known": 0}
    assert "is deleted." in ff.stdout("schedules", "delete", "tenant-7")
    assert "There is no schedule" in ff.stdout("schedules", "delete", "tenant-7")


DAILY, INPUT = ("--cron", "@daily"), ("--payload", '{"region": "t7"}')


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (("--cron", "61 * * * *", *INPUT), "bad minute"),
        (("--cron", "* * * *", *INPUT), "it needs five"),
        ((*DAILY, *INPUT, "--tz", "Mars/Base"), "write one like Europe/Berlin"),
        ((*INPUT,), "give one of cron=, every= and at="),
        ((*DAILY, *INPUT, "--every", "5s"), "it has cron and every"),
        (("--every", "10ms", *INPUT), "every: "),
        ((*DAILY, *INPUT, "--jitter=-5s"), "jitter: "),
        ((*DAILY, *INPUT, "--catch-up", "1s"), 'write "10s" or more'),
        ((*DAILY, *INPUT, "--overlap", "often"), "not one of skip, queue_one"),
        ((*DAILY, "--payload", "[1]"), "no JSON object"),
        ((*DAILY, "--payload", '{"region": 7}'), "region"),
        ((*DAILY,), "region"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_with_its_fix_and_not_created(
    ff: Terminal, shop: str, options: tuple[str, ...], hint: str
) -> None:
    refused = ff.run("schedules", "create", "x", shop, *options)
    assert refused.exit_code > 0
    assert hint in flat(refused.stderr)
    assert "No schedules" in ff.stdout("schedules", "list")


def test_what_cannot_be_done_with_a_schedule_is_refused_with_its_fix_and_changes_nothing(
    ff_or_server: Terminal, shop: str
) -> None:
    ff = ff_or_server
    # Each minute of a leap day: it does not fire while its document is compared.
    ff.stdout("schedules", "create", "x", shop, "--cron", "* * 29 2 *", *INPUT)
    before = ff.document("schedules", "list")
    for words, hint in (
        (("create", "x", shop, *DAILY, *INPUT), "exists with another definition; delete it first"),
        (("pause", "nobody"), "`ff schedules list` shows which schedules there are"),
        (("backfill", "x", "yesterday", "today"), "write it like 2026-11-17T00:00Z"),
        (("backfill", "x", "2026-01-02", "2026-01-01"), "start is not before end"),
        (("backfill", "x", "2026-01-01", "2200-01-01"), "end lies in the future"),
        (("backfill", "x", "2024-02-29", "2024-03-01"), "more than 1000 instants; choose a shorter time"),
        (("backfill", "x", "2024-02-29", "2024-02-29T05:00"), 'choose a shorter time, or pass overlap="allow"'),
        (("backfill", "x", "2024-02-29", "2024-03-01", "--overlap", "often"), "overlap: "),
    ):
        refused = ff.run("schedules", *words)
        assert refused.exit_code > 0, words
        assert hint in flat(refused.stderr), words
    assert ff.document("schedules", "list") == before


def flat(text: str) -> str:
    """Return a text without the frames and line breaks of an error box."""
    return " ".join(text.replace("│", " ").split())
