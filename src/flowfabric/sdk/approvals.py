"""Approvals: a question to people, each of whom votes through a signed link.

`ctx.approval` (`durable/waits.py`) opens a gate with a waitpoint for each approver; `rules.durable.gates` counts the
votes, one for each waitpoint.
"""

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
    """A signed link to a waitpoint. Its `path` identifies it; its token may change, and is empty after the vote."""

    path: str

    @classmethod
    def for_waitpoint(cls, base_url: str, run_id: str, waitpoint_id: str, token: str) -> ApprovalLink:
        """Return the link to a waitpoint."""
        # Both parts are quoted: a key id may be any text, and the braces in an id are not allowed in a URL.
        path = f"/v1/waitpoints/{quote(run_id, safe=':')}/{waitpoint_id}"
        link = cls(f"{base_url}{path}?token={quote(token, safe=':')}")
        link.path = f"/v1/waitpoints/{run_id}/{waitpoint_id}"  # part of the digest of recorded steps: do not change
        return link

    def __repr__(self) -> str:
        return f"<Link {self.partition('?')[0]}>"  # without the token, which must not appear in logs


class Ballot(msgspec.Struct, Generic[V], frozen=True):
    """One vote: its value, the voter if known, and when it was accepted."""

    value: V
    by: str
    at_ms: int


class Votes(Sequence[Ballot[V]]):
    """The votes in the order in which they arrived. `expired` is True if too few arrived in time."""

    def __init__(self, ballots: list[Ballot[V]], *, expired: bool) -> None:
        self._ballots = ballots
        self.expired = expired

    @overload
    def __getitem__(self, index: int) -> Ballot[V]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Ballot[V]]: ...
    def __getitem__(self, index: int | slice) -> Ballot[V] | list[Ballot[V]]:
        return self._ballots[index]

    def __len__(self) -> int:
        return len(self._ballots)

    def __repr__(self) -> str:
        return f"<Votes {len(self._ballots)}{' expired' if self.expired else ''}>"


class Approval(Generic[V]):
    """An open approval with one link per approver. Await it for the votes; this frees the slot meanwhile."""

    def __init__(
        self,
        durable: DurableAttempt,
        codec: ValueCodec,
        opened: OpenedGate | GateMemo,
        *,
        base_url: str,
        run_id: str,
        waitpoint_ids: Sequence[str],
    ) -> None:
        self._durable = durable
        self._codec = codec
        self._opened = opened
        links = [] if isinstance(opened, GateMemo) else opened.links
        tokens = {link.waitpoint_id: link.token.reveal() for link in links}
        self.links: list[str] = [
            ApprovalLink.for_waitpoint(base_url, run_id, waitpoint_id, tokens.get(waitpoint_id, ""))
            for waitpoint_id in waitpoint_ids
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
                self._codec.load(from_json(signal.payload or b"null"), "vote"),
                signal.source_identity,
                signal.accepted_at,
            )
            for signal in signals
        ]
        return Votes(ballots, expired=memo.ended_as is GateOutcome.TIMED_OUT)
