"""The contract type of the import contracts: an allowlist of what a package may import."""

from __future__ import annotations

import sys
from typing import cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class Sees(Contract):  # type: ignore[misc, unused-ignore]
    """Each of `packages` imports nothing but itself, `sees` and the standard library, and nothing of `never`.

    Without `sees`, everything is allowed. Third-party packages have to be listed.
    """

    type_name = "sees"

    packages = fields.SetField(subfield=fields.StringField())
    sees = fields.SetField(subfield=fields.StringField(), required=False)
    never = fields.SetField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        sees, never = self._names("sees"), self._names("never") or set()
        broken = [
            detail
            for package in sorted(self._names("packages") or ())
            for importer in sorted(graph.modules)
            if _within(importer, {package})
            for imported in sorted(graph.find_modules_directly_imported_by(importer))
            if not _within(imported, {package})
            if _within(imported, never) or not (sees is None or _within(imported, sees) or _is_standard(imported))
            for detail in graph.get_import_details(importer=importer, imported=imported)
        ]
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for detail in check.metadata["broken"]:
            output.print_error(f"{detail['importer']}:{detail['line_number']} must not import {detail['imported']}")
            output.print_error(f"    {detail['line_contents']}", bold=False)

    def _names(self, field: str) -> set[str] | None:
        return cast("set[str] | None", getattr(self, field))


def _within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names
