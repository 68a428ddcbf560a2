"""Every example runs with one command, prints its expected output, and leaves no files."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import emptied
from tests.postgres_install import ROOT

EXAMPLES = ROOT / "examples"

EXPECTED = {
    "cart": [
        "apples is in, 1 in the cart",
        "bread is in, 2 in the cart",
        "cheese is refused: the cart is full",
        "cheese is in, 2 in the cart",
        "order of ana: bread, cheese",
        r"the total was 1150 cents\n$",
    ],
    "cart_actor": [
        "milk: a new cart",
        "sugar: the same cart",
        r"ana bought milk, eggs, flour, sugar in life 1\n",
        r"found by its key: True\n$",
    ],
    "changed_function": [
        r"early is charged\n",
        "held by version 2: step 'charge_card' would run for the first time although 'charge'.* ran before",
        r"late is checked\n.*late is charged by the new function",
        "receipt of early",
        r"receipt of late\n$",
    ],
    "coding_agent": [
        "the reviewer says: change please add a docstring",
        "the reviewer says: merge",
        r"merged:\ndef add\(a, b\):\n    \"\"\"Add two numbers.\"\"\"\n    return a \+ b",
        r"log: round 1: add\(2, 2\) is 0, not 4",
        "log: round 3: tests pass",
    ],
    "declined_card": [
        (
            r"visa is charged 500 cents\n.*please send another card: visa has no money\n"
            r"(.*please send another card: visa has no money\n)*.*amex is charged 500 cents\n.*receipt of amex\n$"
        ),
    ],
    "debounced_index": [
        "5 submits, 1 run",
        "ana is indexed once, at version 5",
        "one call for one, three, eleven",
        r"one: 3\n.*three: 5\n.*eleven: 6\n$",
    ],
    "deploy_approval": [
        "2 links were mailed",
        "v7 waits, and no worker runs at all",
        "approved by ana and bo",
        "v7 is live",
        "v8 was rejected: it is Friday",
    ],
    "external_callback": [
        "with a forged token I get 403",
        "with mine I get 202",
        "order-7: paid, 4200 cents, says the payment service",
    ],
    "fastapi_app": [
        "refused with 422",
        'data: "word-1 "',
        'data: "word-1 word-2 word-3 word-4 word-5 word-6"',
        "asked again later: completed",
    ],
    "incident_remediation": [
        "safe measure: caches cleared",
        "ana does not answer",
        "bo is paged",
        "memory leak: restart approved by bo, healthy again",
    ],
    "llm_race": [
        "as it speaks: swift says: because of the 4 reasons.",
        "swift says: .* / steady says: ",
        "2 models answered, 3 were stopped",
    ],
    "media_pipeline": [
        "11 nodes, 17 edges",
        "probe holiday.mov",
        "published: published 3 renditions with 5 captions",
        "announced: on east:480p and west:480p",
        "alerted: notified the operators",
        "10 completed, 1 failed",
    ],
    "nightly_report": [
        "139 nights, 0 skipped, 0 missed",
        "30 Mar at 02:30 in Berlin, 01:30 UTC",
        "31 Mar at 03:00 in Berlin, 01:00 UTC",
        r"01 Apr at 02:30 in Berlin, 00:30 UTC\n$",
    ],
    "polling": [
        "render-7: asked 2 times, not ready",
        "render-7 is ready after 3 calls",
        r"given up: NotReady after \d calls",
    ],
    "recurring_job": [
        r"reports: report of eu for …\d\d, \d+ ms after its time",
        "by hand: report of eu",
        "2 instants made up for, 1 had a run",
        r"paused: three are enough; \d+ runs so far",
    ],
    "retry_and_cancel": [
        "charge order-7: attempt 3",
        "order-7 is paid",
        "429, come back in 300 ms\n.*order-7 was accepted",
        "refund failed at once: Fatal: order-8 was never paid",
        "export was cancelled: nobody needs it any more",
        "cleans up",
    ],
    "saga": [
        (
            r"flight booked for ana\n.*hotel asked for ana\n.*flight-7 cancelled\n.*the mail server does not answer\n"
            r".*ana is told: rolled back: no hotel for 3 nights \(3\)\n"
        ),
        "in 2 attempts",
    ],
    "token_budget": [
        "acme: answered for 700 tokens",
        "two attempts, paid for once: 700 of 1000 tokens",
        "acme has spent its day: BudgetExceeded",
        "zeta: answered for 700 tokens",
        "the second digest sleeps: Budget .* is exhausted: 800 of 1,000 tokens are used",
        "after the reset: a digest of 5 pages",
    ],
}


def test_every_example_has_an_expected_output() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "stage") == sorted(EXPECTED)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_example_prints_the_expected_output(name: str, tmp_path: Path) -> None:
    check_example(name, tmp_path)


DURABLE = ("saga", "declined_card", "polling", "cart", "cart_actor", "debounced_index", "recurring_job")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place"),  # beside SQLite, above; each release of `changed_function` has a memory of its own
    [
        *((name, "memory") for name in DURABLE),
        *((name, "postgres") for name in (*DURABLE, "changed_function")),
        *((name, "valkey") for name in sorted(EXPECTED)),
    ],
)
def test_the_example_prints_the_same_on_other_stores(
    name: str, place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    match place:
        case "memory":
            url = "memory://"
        case "postgres":
            url = asyncio.run(emptied(request.getfixturevalue("own_database")))
        case _:
            url = request.getfixturevalue("valkey_url")
    check_example(name, tmp_path, url=url)


def check_example(name: str, tmp_path: Path, *, url: str | None = None) -> None:
    """Run an example on SQLite or the store at this URL, and check what it prints and leaves behind."""
    environ = {key: value for key, value in os.environ.items() if key != "FLOWFABRIC_URL"}
    environ |= {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT / "src")}
    environ |= {} if url is None else {"FLOWFABRIC_URL": url}
    (tmp_path / "tmp").mkdir()

    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=90,
    )

    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    rest = done.stdout
    for pattern in EXPECTED[name]:
        found = re.search(pattern, rest)
        assert found, f"{pattern!r} was not printed, or not in this order: {done.stdout}"
        rest = rest[found.end() :]
    assert [*tmp_path.rglob("*.db")] == []


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_docstring_of_the_example_shows_its_command(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()

    assert text.startswith('"""')
    assert f"python examples/{name}.py\n" in text.split('"""')[1]
    assert len(text.splitlines()) <= 120
