"""Owners: which budget or quota policy an id refers to.

A budget or quota policy is identified by namespace and id. An id in the policy of an execution refers to the one
defined in the execution's namespace, else to the one defined in `default`, which all namespaces share. If it is defined
in neither, it belongs to the namespace: usage of an unknown budget is recorded there and hides no shared one.

Both have the same partition, which is derived from the id alone, so one load of one partition is enough. Definitions
are never removed: an answer stays valid until the id is defined in the execution's own namespace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from flowfabric.model.security.owned_id import DEFAULT_NAMESPACE, NamespacedId


class LimitRoot(Protocol):
    """The aggregate root of a budget or quota policy."""

    @property
    def defined(self) -> bool: ...


def candidates(namespace: str, ids: Iterable[str]) -> list[NamespacedId]:
    """Return every budget or quota policy that these ids may refer to in a namespace."""
    namespaces = dict.fromkeys((namespace, DEFAULT_NAMESPACE))
    return [NamespacedId(name, limit_id) for limit_id in ids for name in namespaces]


def resolve_owner(namespace: str, limit_id: str, roots: Mapping[NamespacedId, LimitRoot | None]) -> NamespacedId:
    """Return what an id refers to in a namespace, given the roots of its candidates."""
    own = NamespacedId(namespace, limit_id)
    if own.is_shared or is_defined(roots.get(own)) or not is_defined(roots.get(own.shared)):
        return own
    return own.shared


def is_defined(root: LimitRoot | None) -> bool:
    """True if the root was defined, not only used."""
    return root is not None and root.defined
