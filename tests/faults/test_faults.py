"""The list of faults is current; `./dev faults` checks that each is detected."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import FAULTS
from tests.faults.__main__ import detecting_test
from tests.faults.fault import SOURCE, Fault
from tests.postgres_install import ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_text_of_a_fault_occurs_in_its_file(fault: Fault) -> None:
    text = (ROOT / SOURCE / fault.file).read_text()
    assert fault.applied(text) != text


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_test_that_detects_a_fault_exists(fault: Fault) -> None:
    path, *names = fault.detected_by.split("::")
    text = Path(ROOT / path).read_text()
    assert not names or f"def {names[-1]}" in text
    assert all(f"class {name}" in text for name in names[:-1])


def test_faults_are_many_and_distinct() -> None:
    assert len(FAULTS) >= 14
    assert len({fault.name for fault in FAULTS}) == len({(fault.file, fault.old) for fault in FAULTS}) == len(FAULTS)


def test_a_fault_whose_text_does_not_occur_once_is_refused() -> None:
    fault = Fault("a fault", "rules/execution/lease.py", "old", "new", "tests")
    assert fault.applied("an old text") == "an new text"
    for text in ("a text", "old and old"):
        with pytest.raises(ValueError, match="a fault: its text occurs"):
            fault.applied(text)


def test_only_a_failed_test_detects_a_fault() -> None:
    assert detecting_test(1, "FAILED tests/a.py::test_it[memory] - AssertionError") == "test_it[memory]"
    assert detecting_test(0, "12 passed") is None
    assert detecting_test(2, "ERROR tests/a.py - SyntaxError") is None
