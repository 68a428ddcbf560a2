"""Drafts and loaded rows have different types; mypy reports an `ignore` below that has become needless."""

from __future__ import annotations

from flowfabric.model.execution import IdempotencyKey
from flowfabric.model.instant import NOW, Draft, FromNow


def expires_at(row: IdempotencyKey) -> int:
    return row.expires_at


def test_a_draft_is_not_a_loaded_row_to_a_type_checker() -> None:
    draft = IdempotencyKey(0, "digest", "id", NOW)
    mixed: IdempotencyKey[Draft] = IdempotencyKey(0, "digest", "id", 5)
    loaded = IdempotencyKey(0, "digest", "id", 5)

    assert expires_at(draft) == FromNow()  # type: ignore[arg-type, comparison-overlap]
    assert expires_at(mixed) == 5  # type: ignore[arg-type]
    assert expires_at(loaded) == 5
