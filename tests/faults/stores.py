"""Slips in how rows are kept and found: a guard that is not checked, an index entry left behind."""

from __future__ import annotations

from tests.faults.fault import Fault

AGREEMENT = "tests/stateful/test_agreement.py::test_a_long_life_is_the_same_on_every_store"
TAKE = "tests/stateful/test_take.py"
GUARDS = "tests/stores/contract/test_guards.py"
HANDING = "tests/stores/contract/test_commit_and_claim.py"
LEASES = "tests/stores/contract/test_leases.py"
RACES = "tests/chaos/test_forced_races.py"

STORES = (
    Fault(
        "memory: the revision is not compared",
        "stores/memory/store.py",
        "return row.revision == guard.revision and (",
        "return (",
        GUARDS,
    ),
    Fault(
        "memory: what must be absent may be there",
        "stores/memory/store.py",
        "return row is None and guard.revision is None",
        "return guard.revision is None",
        GUARDS,
    ),
    Fault(
        "memory: a change comes before its time",
        "stores/memory/store.py",
        "if change.not_before is not None and now < change.not_before:",
        "if change.not_before is not None and now < 0:",
        GUARDS,
    ),
    Fault(
        "memory: a guard does not ask for the epoch",
        "stores/memory/store.py",
        "row.lease_id != check.lease_id or row.lease_epoch != check.lease_epoch or",
        "row.lease_id != check.lease_id or",
        GUARDS,
    ),
    Fault(
        "memory: a take ignores grants",
        "stores/memory/store.py",
        "if granted_until is None or granted_until <= now:",
        "if True:",
        TAKE,
    ),
    Fault(
        "memory: the feed leaves an entry out between two pages",
        "stores/memory/store.py",
        "return FeedPage(events, events[-1].position if events else after, has_gap)",
        "return FeedPage(events, events[-1].position + 1 if events else after, has_gap)",
        AGREEMENT,
    ),
    Fault(
        "a renewal does not ask for the epoch",
        "rules/execution/lease.py",
        '            "lease_epoch": Parameter("lease_epoch"),\n',
        "",
        LEASES,
    ),
    Fault(
        "memory: a renewal does not ask what its template asks",
        "model/change.py",
        "getattr(row, name) == evaluate(value, row, parameters)",
        "getattr(row, name) == getattr(row, name)",
        LEASES,
    ),
    Fault(
        "sqlite: a renewal does not ask what its template asks",
        "stores/sqlite/statements.py",
        'f"r.{name} IS {_value_sql(value, sql)}"',
        'f"r.{name} IS r.{name}"',
        LEASES,
    ),
    Fault(
        "sqlite: the revision of a held row is not compared",
        "stores/sqlite/statements.sql",
        "   AND (r.revision IS NOT g.column{revision}\n        OR r.lease_id",
        "   AND (r.lease_id",
        GUARDS,
    ),
    Fault(
        "sqlite: a take ignores grants",
        "stores/sqlite/statements.sql",
        "WHERE line = ? AND (granted_until IS NULL OR granted_until <= ?)",
        "WHERE line = ? AND (granted_until IS NULL OR granted_until <= ? OR 1)",
        TAKE,
    ),
    Fault(
        "what each root is supposed to hold of its own is not compared",
        "stores/postgres/commit/fragments.py",
        'f\'t."{name}" is not distinct from {params[f"expected {name}"]}\'',
        'f\'t."{name}" is null or {params[f"expected {name}"]} is null or true\'',
        GUARDS,
    ),
    Fault(
        "what each root is supposed to hold of its own is compared where it is set",
        "stores/sqlite/statements.py",
        'f"r.{name} IS g.column{ordinal}"',
        'f"coalesce(r.{name} = g.column{ordinal}, true)"',
        GUARDS,
    ),
    Fault(
        "postgres: the revision is not compared",
        "stores/postgres/commit/fragments.py",
        "f\"{params['revision']} = t.revision\"",
        "f\"{params['revision']} is not null\"",
        RACES,
    ),
    Fault(
        "postgres: what must be absent may be there",
        "stores/postgres/commit/fragments.py",
        "t.found is null as holds",
        "true as holds",
        GUARDS,
    ),
    Fault(
        "postgres: a renewal does not ask what its template asks",
        "stores/postgres/claim.py",
        "is not distinct from {value}'",
        'is not distinct from e."{name}"\'',
        LEASES,
    ),
    Fault(
        "postgres: a take continues no attempt, it begins a new one",
        "stores/postgres/commit/fragments.py",
        "is null then {otherwise} else {then} end'",
        "is null then {then} else {then} end'",
        TAKE,
    ),
    Fault(
        "postgres: work is handed over although somebody stands in line",
        "stores/postgres/claim.sql",
        "    select not exists (\n",
        "    select true or not exists (\n",
        HANDING,
    ),
    Fault(
        "postgres: what a change writes beside the line is lost when its row is handed over",
        "stores/postgres/commit/claim.py",
        "    if not claim_columns(request.template).overwritten >= set(names):\n        return None\n",
        "",
        HANDING,
    ),
)
