"""A store that loses things on the way: the request, the answer, or for a while both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

from flowfabric.errors import StoreFault, StoreUnavailable
from flowfabric.model.change import Change, RowTemplate
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, CommitAndClaimResult, LeaseRef
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Loaded, Read, Scan

A = TypeVar("A")


class Loss(Enum):
    """What becomes of the next write."""

    REQUEST = "the request is lost, and everybody knows"
    DOUBT = "the request is lost, and nobody knows"
    ANSWER = "it is written, and the answer is lost"
    LATE = "it is written only after somebody has looked"


class LosingStore:
    """Hands everything on to a store, but for the next write, and for looks that find nobody at home."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.next_loss: Loss | None = None
        self.looks_lost = 0
        self.after_loss: Callable[[], Awaitable[Any]] | None = None
        self.losses = 0
        self._late: Callable[[], Awaitable[Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def try_load_now(self, wants: Sequence[Read]) -> Loaded | None:
        return None  # every look is a load

    async def load(self, wants: Sequence[Read]) -> Loaded:
        if self.looks_lost:
            self.looks_lost -= 1
            self.losses += 1
            raise _lost(in_doubt=False)
        return await self._looking(self.store.load(wants))

    async def scan(self, scan: Scan) -> list[Any]:
        return await self._looking(self.store.scan(scan))

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[int | None]:
        return await self._losing(lambda: self.store.commit(changes, hint))

    async def commit_and_claim(
        self, changes: Sequence[Change], hint: frozenset[str], take: ClaimRequest
    ) -> CommitAndClaimResult:
        return await self._losing(lambda: self.store.commit_and_claim(changes, hint, take))

    async def claim_rows(self, take: ClaimRequest) -> ClaimedRows:
        return await self._losing(lambda: self.store.claim_rows(take))

    async def renew(self, leases: Sequence[LeaseRef], template: RowTemplate) -> list[int | None]:
        return await self._losing(lambda: self.store.renew(leases, template))

    async def _looking(self, look: Awaitable[A]) -> A:
        seen = await look
        if self._late is not None:
            late, self._late = self._late, None
            await late()
        return seen

    async def _losing(self, write: Callable[[], Awaitable[A]]) -> A:
        loss, self.next_loss = self.next_loss, None
        if loss is None:
            return await write()
        self.losses += 1
        if loss is Loss.ANSWER:
            await write()
        if loss is Loss.LATE:
            self._late = write
        if self.after_loss is not None:
            await self.after_loss()
        raise _lost(in_doubt=loss is not Loss.REQUEST)


def _lost(*, in_doubt: bool) -> StoreUnavailable:
    return StoreUnavailable("lost on the way", source=StoreFault.TRANSPORT, in_doubt=in_doubt)
