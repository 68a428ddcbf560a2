"""Joins: how many children, or upstream nodes of a flow, have to succeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowfabric.errors import InvalidInput
from flowfabric.sdk import validation

if TYPE_CHECKING:
    from flowfabric.sdk.flows import Node, NodeOutcome


class Join:
    """The base of joins. In a flow, `of` are the outcomes that count, besides the nodes in the arguments.

    With `cancel_rest`, members that have not ended when the join is met are cancelled.
    """

    def __init__(self, *of: NodeOutcome | Node[Any], cancel_rest: bool = False) -> None:
        self.of = of
        self.cancel_rest = cancel_rest

    def required_successes(self, count: int) -> int:
        """Return how many of `count` members have to succeed."""
        raise NotImplementedError

    def policy(self) -> dict[str, Any] | None:
        """Return the engine's edge policy for a flow; None for the default."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), self.of, self.cancel_rest))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


class AllOf(Join):
    """A join that is met when every member has succeeded."""

    def __init__(self, *of: NodeOutcome | Node[Any]) -> None:
        super().__init__(*of)

    def required_successes(self, count: int) -> int:
        return count

    def policy(self) -> dict[str, Any] | None:
        return None


class AnyOf(Join):
    """A join that is met by the first success."""

    def required_successes(self, count: int) -> int:
        return 1

    def policy(self) -> dict[str, Any] | None:
        return {"kind": "any_of", "on_satisfied": "cancel_remaining" if self.cancel_rest else "let_run"}


class Quorum(Join):
    """A join that is met by `k` successes."""

    def __init__(self, k: int, *of: NodeOutcome | Node[Any], cancel_rest: bool = False) -> None:
        super().__init__(*of, cancel_rest=cancel_rest)
        self.k = validation.validate_int("quorum", k, minimum=1)

    def required_successes(self, count: int) -> int:
        if self.k > count:
            raise InvalidInput(f"quorum: {self.k} cannot come from {count}")
        return self.k

    def policy(self) -> dict[str, Any] | None:
        rest = "cancel_remaining" if self.cancel_rest else "let_run"
        return {"kind": "quorum", "k": self.k, "on_satisfied": rest}
