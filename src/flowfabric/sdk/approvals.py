"""Approvals: a question to people, with links that are safe to hand to anyone."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload
from urllib.parse import quote

import msgspec

from flowfabric.model.gate import GateMemo, GateOutcome
from flowfabric.sdk.serialization.values import ValueCodec, from_json

if TYPE_CHECKING:
    from flowfabric.engine.operations.durable import OpenedGate
    from flowfabric.sdk.durable.attempt import DurableAttempt

V = TypeVar("V")


class ApprovalLink(str):
    """A signed link. Where it leads tells it apart from others; its token does not, and goes when the vote is over."""

    path: str

    @classmethod
    def for_waitpoint(cls, base_url: str, run_id: str, waitpoint_id: str, token: str) -> ApprovalLink:
        """The link to one waitpoint."""
        # A kid may be any text, and the braces of an id are no characters of a URL.
        path = f"/v1/waitpoints/{quote(run_id, safe=':')}/{waitpoint_id}"
        link = cls(f"{base_url}{path}?token={quote(token, safe=':')}")
        link.path = f"/v1/waitpoints/{run_id}/{waitpoint_id}"  # as remembered steps were told apart by before
        return link

    def __repr__(self) -> str:
        return f"<Link {self.partition('?')[0]}>"  # a list of links in a log votes for nobody


class Ballot(msgspec.Struct, Generic[V], frozen=True):
    """One vote."""

    value: V
    by: str
    at_ms: int


class Votes(Sequence[Ballot[V]]):
    """The votes in the order in which they came; `expired` when there were too few in time."""

    def __init__(self, ballots: list[Ballot[V]], *, expired: bool) -> None:
        self._ballots = ballots
        self.expired = expired

    @overload
    def __getitem__(self, place: int) -> Ballot[V]: ...
    @overload
    def __getitem__(self, place: slice) -> list[Ballot[V]]: ...
    def __getitem__(self, place: int | slice) -> Ballot[V] | list[Ballot[V]]:
        return self._ballots[place]

    def __len__(self) -> int:
        return len(self._ballots)

    def __repr__(self) -> str:
        return f"<Votes {len(self._ballots)}{' expired' if self.expired else ''}>"


class Approval(Generic[V]):
    """An open question. Await it for the votes; the slot is free while people think."""

    def __init__(
        self,
        durable: DurableAttempt,
        shape: ValueCodec,
        opened: OpenedGate | GateMemo,
        *,
        base_url: str,
        run_id: str,
        points: Sequence[str],
    ) -> None:
        self._durable = durable
        self._shape = shape
        self._opened = opened
        tokens = {} if isinstance(opened, GateMemo) else {one.waitpoint_id: one.token.reveal() for one in opened.links}
        self.links: list[str] = [
            ApprovalLink.for_waitpoint(base_url, run_id, point, tokens.get(point, "")) for point in points
        ]

    def __await__(self) -> Generator[Any, Any, Votes[V]]:
        return self._votes().__await__()

    async def _votes(self) -> Votes[V]:
        memo = self._opened
        if not isinstance(memo, GateMemo):
            memo = await self._durable.wait_for_gate(memo)
        signals = await self._durable.engine.read_votes(memo)
        ballots = [
            Ballot(
                self._shape.load(from_json(signal.payload or b"null"), "vote"),
                signal.source_identity,
                signal.accepted_at,
            )
            for signal in signals
        ]
        return Votes(ballots, expired=memo.ended_as is GateOutcome.TIMED_OUT)
