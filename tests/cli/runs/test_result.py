"""`ff result`: the exact bytes of the result, and an exit code for each outcome."""

from __future__ import annotations

import json

import pytest

from tests.cli.terminal import Terminal


@pytest.fixture
def ff(ff_or_server: Terminal) -> Terminal:
    return ff_or_server


@pytest.mark.parametrize("result", [b'{"ok":true}', b"\xff\x00", b""])
def test_the_result_is_printed_as_bytes(ff: Terminal, result: bytes) -> None:
    execution = ff.submit()
    ff.end_one(result=result)

    answer = ff.run("result", execution)

    assert (answer.exit_code, answer.stdout_bytes, answer.stderr) == (0, result, "")


def test_the_json_document_contains_the_outcome(ff: Terminal) -> None:
    execution = ff.submit()
    ff.end_one(result=b"42")

    assert ff.document("result", execution) == {
        "execution_id": execution,
        "outcome": "success",
        "result": {"bytes": 2, "text": "42"},
        "reason": None,
        "error": None,
    }


def test_a_failed_and_a_cancelled_execution_have_different_exit_codes(ff: Terminal) -> None:
    failed = ff.submit()
    ff.end_one(reason="no luck")
    cancelled = ff.submit()
    ff.stdout("cancel", cancelled, "--reason", "not needed")

    for execution, code, words in ((failed, 1, "failed: no luck"), (cancelled, 3, "was cancelled: not needed")):
        answer = ff.run("result", execution)
        assert (answer.exit_code, answer.stdout) == (code, "")
        assert answer.stderr == f"ff: {execution} {words}\n"
        assert ff.run("result", execution, "--json").exit_code == code


def test_an_execution_that_has_not_ended_is_reported_with_the_reason(ff: Terminal) -> None:
    execution = ff.submit()

    for options in ((), ("--timeout", "10ms")):
        answer = ff.run("result", execution, *options)
        assert (answer.exit_code, answer.stdout) == (5, "")
        assert f"ff: {execution} has not ended. No live worker serves lane default" in answer.stderr
    assert "Hint: --wait waits for its end" in ff.run("result", execution).stderr


def test_wait_blocks_until_the_execution_ends(ff: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.cli.commands.results.POLL_MS", 50)
    execution = ff.submit()
    answer = ff.run_until_explained(monkeypatch, lambda: ff.end_one(result=b"42"), "result", execution, "--wait")

    assert (answer.exit_code, answer.stdout) == (0, "42")
    assert answer.stderr.startswith("· No live worker serves lane default")


def test_type_and_text_of_the_failure_are_printed(ff: Terminal) -> None:
    execution = ff.submit()
    error = {"type": "shop.Declined", "text": "card 4242", "category": "Declined"}
    reason = 'Declined: card 4242\n  File "shop.py", line 3, in pay'
    ff.end_one(reason=reason, failure=json.dumps(error).encode())

    assert ff.run("result", execution).stderr == (
        f'ff: {execution} failed: shop.Declined: card 4242\n  File "shop.py", line 3, in pay\n'
    )
    assert json.loads(ff.run("result", execution, "--json").stdout)["error"] == error
    shown = ff.stdout("show", execution)
    assert shown.count("shop.Declined: card 4242") == 2, "of the run, and of its attempt"
    assert ff.document("show", execution)["attempts"][0]["error"] == error
