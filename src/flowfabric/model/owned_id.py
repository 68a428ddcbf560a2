"""Ids that belong to a namespace: two namespaces may use one id without meeting."""

from __future__ import annotations

from typing import NamedTuple

DEFAULT_NAMESPACE = "default"


class NamespacedId(NamedTuple):
    """A budget or quota policy by its owner and its id. It begins the key of each of its rows."""

    namespace: str
    id: str

    @property
    def is_shared(self) -> bool:
        """True in the default namespace, where policies of all namespaces find it."""
        return self.namespace == DEFAULT_NAMESPACE

    @property
    def shared(self) -> NamespacedId:
        """The same id in the default namespace."""
        return NamespacedId(DEFAULT_NAMESPACE, self.id)

    def __str__(self) -> str:
        """One text for both; an id of the default namespace stands for itself, as it did before ids had owners."""
        return self.id if self.is_shared else f"{self.id}@{self.namespace}"


def parse_namespaced_id(text: str) -> NamespacedId:
    """Read what `str` made. An id is a UUID, so the first `@` ends it, whatever a namespace contains."""
    found, _, namespace = text.partition("@")
    return NamespacedId(namespace if "@" in text else DEFAULT_NAMESPACE, found)
