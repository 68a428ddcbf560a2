"""Joins: when several children, or several nodes of a flow, are enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowfabric.errors import InvalidInput
from flowfabric.sdk import validation

if TYPE_CHECKING:
    from flowfabric.sdk.flows import Node, NodeOutcome


class Join:
    """A number of successes. In a flow, `of` are the ends that count, beside the nodes among the arguments."""

    def __init__(self, *of: NodeOutcome | Node[Any], cancel_rest: bool = False) -> None:
        self.of = of
        self.cancel_rest = cancel_rest

    def required_successes(self, count: int) -> int:
        """How many successes it needs of so many."""
        raise NotImplementedError

    def policy(self) -> dict[str, Any] | None:
        """What the engine is told for a flow; None for its default."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), self.of, self.cancel_rest))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


class AllOf(Join):
    """Every one has to succeed."""

    def __init__(self, *of: NodeOutcome | Node[Any]) -> None:
        super().__init__(*of)

    def required_successes(self, count: int) -> int:
        return count

    def policy(self) -> dict[str, Any] | None:
        return None


class AnyOf(Join):
    """One success is enough."""

    def required_successes(self, count: int) -> int:
        return 1

    def policy(self) -> dict[str, Any] | None:
        return {"kind": "any_of", "on_satisfied": "cancel_remaining" if self.cancel_rest else "let_run"}


class Quorum(Join):
    """`k` successes are enough."""

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
