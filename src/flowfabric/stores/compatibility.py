"""Which schemas a release runs on.

A release runs on its own schema, and on the next one if that is compatible: additive, so that rows which the older
release writes keep the columns it does not know. A migration says which it is in its leading comment:

    -- compatible: yes

Without such a line it is not compatible. What a migration says is kept beside its number in `ff_schema_version`, where
releases that have never seen its file find it. On any other newer schema a release stops with `SchemaTooNew`, also
while it runs.
"""

from __future__ import annotations

import re

from flowfabric.errors import SchemaTooNew

_SAYS = re.compile(r"(?:--[^\n]*\n)*?-- compatible: (yes|no)\s*\n")


def is_compatible(text: str) -> bool:
    """True if this migration says that the release before it may go on."""
    says = _SAYS.match(text)
    return says is not None and says[1] == "yes"


def refuse_newer(found: int, known: int, *, compatible: bool) -> None:
    """Raise `SchemaTooNew` unless a release that knows schemas up to `known` runs on this one.

    `compatible` is what the newest migration that was applied says of itself.
    """
    if found > known and not (found == known + 1 and compatible):
        raise SchemaTooNew(found=found, known=known)
