"""Instants of rows, in whole milliseconds.

A loaded row has integers. A *draft*, a row that a rule builds for an insert or upsert, may have `FromNow` instead: the
store adds its own clock, read once per commit, so that no caller's clock decides what is stored. Row types are generic
in their instants, and `Execution` means `Execution[int]`, so a checker refuses a draft where a loaded row is expected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec


class FromNow(msgspec.Struct, frozen=True, gc=False):
    """An instant (or a queue position) relative to the store's clock at the commit, in milliseconds."""

    offset: int = 0


NOW = FromNow(0)

if TYPE_CHECKING:
    Instant = TypeVar("Instant", bound=int | FromNow, default=int, covariant=True)
else:  # `default` needs Python 3.13; msgspec decodes an unbound row by the bound
    Instant = TypeVar("Instant", bound=int)

Draft = int | FromNow  # `Execution[Draft]` is a draft of an execution
