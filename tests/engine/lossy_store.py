"""A store that loses requests, replies, or both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

from flowfabric.errors import StoreFault, StoreUnavailable
from flowfabric.model.change import Change, RowTemplate
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, CommitAndClaimResult, LeaseRef
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Loaded, Read, Scan
from flowfabric.stores.verdicts import Verdict

A = TypeVar("A")


class Loss(Enum):
    """The fault that is injected into the next write."""

    REQUEST = "the request is lost, and the caller knows"
    DOUBT = "the request is lost, and the outcome is unknown"
    ANSWER = "it is written, and the reply is lost"
    LATE = "it is written only after the next read"


class LossyStore:
    """Delegates to a store, except that it can lose the next write or the next loads."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.next_loss: Loss | None = None
        self.loads_to_lose = 0
        self.after_loss: Callable[[], Awaitable[Any]] | None = None
        self.losses = 0
        self._late: Callable[[], Awaitable[Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def try_load_now(self, reads: Sequence[Read]) -> Loaded | None:
        return None  # Every read is a load.

    async def load(self, reads: Sequence[Read]) -> Loaded:
        if self.loads_to_lose:
            self.loads_to_lose -= 1
            self.losses += 1
            raise _lost(in_doubt=False)
        return await self._after_read(self.store.load(reads))

    async def scan(self, scan: Scan) -> list[Any]:
        return await self._after_read(self.store.scan(scan))

    async def commit(self, changes: Sequence[Change], topics: frozenset[str] = frozenset()) -> list[Verdict]:
        return await self._with_loss(lambda: self.store.commit(changes, topics))

    async def commit_and_claim(
        self, changes: Sequence[Change], topics: frozenset[str], request: ClaimRequest
    ) -> CommitAndClaimResult:
        return await self._with_loss(lambda: self.store.commit_and_claim(changes, topics, request))

    async def claim_rows(self, request: ClaimRequest) -> ClaimedRows:
        return await self._with_loss(lambda: self.store.claim_rows(request))

    async def renew(self, leases: Sequence[LeaseRef], template: RowTemplate) -> list[int | None]:
        return await self._with_loss(lambda: self.store.renew(leases, template))

    async def _after_read(self, read: Awaitable[A]) -> A:
        loaded = await read
        if self._late is not None:
            late, self._late = self._late, None
            await late()
        return loaded

    async def _with_loss(self, write: Callable[[], Awaitable[A]]) -> A:
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
