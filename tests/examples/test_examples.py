"""Every example runs with one command, prints its expected output, and leaves no files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.postgres_install import ROOT

EXAMPLES = ROOT / "examples"

EXPECTED = {
    "coding_agent": [
        "the reviewer says: change please add a docstring",
        "the reviewer says: merge",
        r"merged:\ndef add\(a, b\):\n    \"\"\"Add two numbers.\"\"\"\n    return a \+ b",
        r"log: round 1: add\(2, 2\) is 0, not 4",
        "log: round 3: tests pass",
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
    "recurring_job": ["exists already", r"report for …\d+, \d+ ms after its time", "3 runs for 3 times"],
    "retry_and_cancel": [
        "charge order-7: attempt 3",
        "order-7 is paid",
        "429, come back in 300 ms\n.*order-7 was accepted",
        "refund failed at once: Fatal: order-8 was never paid",
        "export was cancelled: nobody needs it any more",
        "cleans up",
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
    environ = {key: value for key, value in os.environ.items() if key != "FLOWFABRIC_URL"}
    environ |= {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT / "src")}
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
