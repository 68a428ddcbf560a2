"""The base class of all errors, and `NotFound`. The text of an error is the first line of its class's docstring."""

from __future__ import annotations

import re
from enum import StrEnum


class Classification(StrEnum):
    """What the caller should do about an error."""

    RETRYABLE = "retryable"  # retry after a short backoff
    COOPERATIVE = "cooperative"  # stop gracefully and report; do not retry blindly
    INFORMATIONAL = "informational"  # the requested state already holds, or it does not matter
    BUG = "bug"  # report it to the maintainers
    TERMINAL = "terminal"  # final; a retry will not help


class FabricError(Exception):
    """FlowFabric could not do what was requested."""

    family: str = "fabric"
    kind: str = "fabric_error"
    classification: Classification = Classification.TERMINAL
    explained_by_detail: bool = False  # the class's sentence adds nothing to a detail

    execution_id: str | None = None

    def __init_subclass__(cls) -> None:
        if cls.__module__.startswith("flowfabric.errors."):
            cls.__module__ = "flowfabric.errors"  # tracebacks show the public import path
            if "kind" not in vars(cls):
                cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self, detail: str = "", **facts: object) -> None:
        if not _OWN_NAMES.isdisjoint(facts):
            raise TypeError(f"not usable as facts: {sorted(_OWN_NAMES.intersection(facts))}")
        super().__init__(detail)
        self.detail = detail
        self.facts = facts
        self.__dict__.update(facts)

    @property
    def retryable(self) -> bool:
        """True if a retry after a short backoff may succeed."""
        return self.classification is Classification.RETRYABLE

    @property
    def sentence(self) -> str:
        """What happened, for people: the first line of the class's docstring."""
        return (type(self).__doc__ or "").partition("\n")[0]

    def __str__(self) -> str:
        """Return what is wrong, with what, and what to do next. Facts nobody can act on remain attributes only."""
        code = self.kind if self.detail in ("", self.kind) else f"{self.kind}: {self.detail}"
        sentence = "" if self.detail and vars(type(self)).get("explained_by_detail") else self.sentence
        shown = ", ".join(f"{name}={self.facts[name]}" for name in _SHOWN if self.facts.get(name) is not None)
        return code + (f" — {sentence}" if sentence else "") + (f" ({shown})" if shown else "")

    def __repr__(self) -> str:
        arguments = [repr(self.detail)] if self.detail else []
        arguments += [f"{name}={value!r}" for name, value in self.facts.items()]
        return f"{type(self).__name__}({', '.join(arguments)})"

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or not isinstance(other, FabricError):
            return NotImplemented
        return (self.kind, self.detail, self.facts) == (other.kind, other.detail, other.facts)

    def __hash__(self) -> int:
        return hash(
            (type(self), self.kind, self.detail)
        )  # facts may be unhashable; equal errors still have equal hashes

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.detail, self.facts)  # required facts are not part of `args`


FabricError.__module__ = "flowfabric.errors"

_OWN_NAMES = frozenset(
    {"args", "classification", "detail", "explained_by_detail", "facts", "family", "kind", "retryable", "sentence"}
)
# Facts shown in a message: things that a person can look up.
_SHOWN = ("execution_id", "flow_id", "budget_id", "quota_policy_id", "waitpoint_id", "kid")


def _rebuild(cls: type[FabricError], detail: str, facts: dict[str, object]) -> FabricError:
    return cls(detail=detail, **facts)


class NotFound(FabricError):
    """There is no such thing."""

    family = "not_found"
    explained_by_detail = True

    entity: str

    def __init__(self, entity: str, detail: str = "", **facts: object) -> None:
        """`entity` is what is missing: execution, flow, budget, quota_policy, waitpoint, api_token…"""
        super().__init__(detail, entity=entity, **facts)
        self.kind = f"{entity}_not_found"

    @property
    def sentence(self) -> str:
        """What is missing, for people."""
        return f"There is no such {self.entity.replace('_', ' ')}."
