"""Owners: which budget or quota policy an id stands for.

A budget or quota policy is identified by namespace and id. An id in the policy of an execution stands for the one that
is defined in the execution's namespace, else for the one that is defined in `default`, which all namespaces share. What
is defined in neither belongs to the namespace: usage of an unknown budget is recorded there, and hides no shared one.

Both have the same partition, which is derived from the id alone, so one load of one partition answers the question.
Definitions are never removed: an answer stays right until somebody defines the id in the execution's own namespace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from flowfabric.model.owned_id import DEFAULT_NAMESPACE, NamespacedId


class LimitRoot(Protocol):
    """The root row of a budget or quota policy."""

    @property
    def defined(self) -> bool: ...


def candidates(namespace: str, ids: Iterable[str]) -> list[NamespacedId]:
    """Every budget or quota policy that these ids may stand for in a namespace."""
    names = dict.fromkeys((namespace, DEFAULT_NAMESPACE))
    return [NamespacedId(name, one) for one in ids for name in names]


def resolve_owner(namespace: str, one: str, roots: Mapping[NamespacedId, LimitRoot | None]) -> NamespacedId:
    """What an id stands for in a namespace, given the roots of its candidates."""
    own = NamespacedId(namespace, one)
    if own.is_shared or is_defined(roots.get(own)) or not is_defined(roots.get(own.shared)):
        return own
    return own.shared


def is_defined(root: LimitRoot | None) -> bool:
    """True for a root that somebody defined, not only used."""
    return root is not None and root.defined
