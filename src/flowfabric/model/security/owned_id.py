"""Namespaced ids: two namespaces may use the same id without conflict."""

from __future__ import annotations

from typing import NamedTuple

DEFAULT_NAMESPACE = "default"


class NamespacedId(NamedTuple):
    """A budget or quota policy by namespace and id. It is the key prefix of all its rows."""

    namespace: str
    id: str

    @property
    def is_shared(self) -> bool:
        """True in the default namespace, which all namespaces share."""
        return self.namespace == DEFAULT_NAMESPACE

    @property
    def shared(self) -> NamespacedId:
        """The same id in the default namespace."""
        return NamespacedId(DEFAULT_NAMESPACE, self.id)

    def __str__(self) -> str:
        """Return one text for both; the default namespace is omitted, as before ids had namespaces."""
        return self.id if self.is_shared else f"{self.id}@{self.namespace}"


def parse_namespaced_id(text: str) -> NamespacedId:
    """Parse what `str` returned. An id is a UUID, so the first `@` ends it, even if the namespace contains one."""
    limit_id, _, namespace = text.partition("@")
    return NamespacedId(namespace if "@" in text else DEFAULT_NAMESPACE, limit_id)
