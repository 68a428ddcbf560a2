"""The error of a store that cannot be reached, and what it has to say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flowfabric.errors import StoreFault, StoreUnavailable


@contextmanager
def unavailable(match: str | None = None, *, in_doubt: bool, source: StoreFault | None = None) -> Iterator[None]:
    """Expect that the block fails since the store is unavailable; `in_doubt` says whether it may have written."""
    with pytest.raises(StoreUnavailable, match=match) as caught:
        yield
    assert caught.value.in_doubt is in_doubt
    assert source is None or caught.value.source is source
