"""Schema compatibility: decides which schema versions a release runs on.

A release runs on its own schema, and on the next one if that is compatible: additive, so that rows written by the older
release stay valid. A migration declares this in its leading comment:

    -- compatible: yes

Without this line a migration is not compatible. The declaration is stored with the version in `ff_schema_version`,
where releases that do not have the migration's file find it. On any other newer schema a release stops with
`SchemaTooNew`, even while it is running (`SchemaWatch` on Postgres and Valkey; SQLite checks in every transaction).
"""

from __future__ import annotations

import re

from flowfabric.errors import SchemaTooNew

_DECLARATION = re.compile(r"(?:--[^\n]*\n)*?-- compatible: (yes|no)\s*\n")


def is_compatible(text: str) -> bool:
    """True if this migration declares that the previous release may keep running."""
    declaration = _DECLARATION.match(text)
    return declaration is not None and declaration[1] == "yes"


def refuse_newer(found: int, known: int, *, compatible: bool) -> None:
    """Raise `SchemaTooNew` unless a release that knows versions up to `known` runs on this version.

    `compatible` is the declaration of the newest applied migration.
    """
    if found > known and not (found == known + 1 and compatible):
        raise SchemaTooNew(found=found, known=known)
