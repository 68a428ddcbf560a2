"""Views take the fields that they share with a row, and the others as they are given."""

from __future__ import annotations

import msgspec
import pytest

from flowfabric.model.view import view_of


class Row(msgspec.Struct, frozen=True):
    name: str
    state: str
    revision: int = 0


class View(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: str
    note: str | None = None


def test_a_view_takes_shared_fields_from_its_row_and_leaves_out_the_others() -> None:
    assert view_of(View, Row("a", "open", revision=7)) == View(name="a", state="open")


def test_a_given_field_counts_before_that_of_the_row() -> None:
    assert view_of(View, Row("a", "open"), state="closed", note="why") == View(name="a", state="closed", note="why")


def test_a_field_that_neither_the_row_nor_the_caller_has_is_an_error() -> None:
    class Wider(View, frozen=True, kw_only=True):
        size: int

    with pytest.raises(TypeError, match="size"):
        view_of(Wider, Row("a", "open"))
