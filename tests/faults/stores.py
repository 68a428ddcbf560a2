"""Faults in the stores: a guard that is not checked, an index entry that is not removed."""

from __future__ import annotations

from tests.faults.fault import Fault

AGREEMENT = "tests/stateful/test_agreement.py::test_a_long_sequence_is_the_same_on_every_store"
TAKE = "tests/stateful/test_store_claims.py"
GUARDS = "tests/stores/contract/test_guards.py"
COMMIT_AND_CLAIM = "tests/stores/contract/test_commit_and_claim.py"
LEASES = "tests/stores/contract/test_leases.py"
RACES = "tests/chaos/test_forced_races.py"

VERDICTS = (
    "tests/stores/contract/test_writes.py::test_a_row_that_exists_refuses_the_change_that_inserts_it_and_no_other"
)

VALKEY_ROWS = "tests/stores/valkey/test_rows.py"

STORES = (
    Fault(
        "valkey: a second insert of one row in a call is written",
        "stores/valkey/lua/commit.lua",
        "there = s.rows[t][key] and true",
        "there = s.original[t] == nil and s.rows[t][key] and true",
        "tests/stores/contract/test_writes.py::test_the_first_of_several_changes_that_insert_one_row_is_written",
    ),
    Fault(
        "valkey: the lease id is not compared",
        "stores/valkey/lua/commit.lua",
        "c[def.lease_id] ~= guard[6] or ",
        "",
        GUARDS,
    ),
    Fault(
        "valkey: an upsert drops the columns of a later release",
        "stores/valkey/lua/commit.lua",
        "if old and old.n > def.width then",
        "if false then",
        f"{VALKEY_ROWS}::test_cells_of_a_later_release_are_carried_through",
    ),
    Fault(
        "valkey: a claim asks for the rows of one partition only",
        "stores/valkey/claims.py",
        "homes = [home for home in homes if home not in short]",
        "homes = []",
        "tests/stores/contract/test_partitions.py",
    ),
    Fault(
        "valkey: a call does not declare the keys of an index",
        "stores/valkey/rows/codec.py",
        "return [self.name, *listed, *(index.suffix for index in self.indexes.values())]",
        "return [self.name, *listed]",
        "tests/stores/valkey/test_functions.py",
    ),
    Fault(
        "valkey: entries that a failover hid are not numbered",
        "stores/valkey/feed.py",
        "await self._number_again(home, numbered[home])",
        "pass",
        "tests/stores/valkey/test_feed.py",
    ),
    Fault(
        "memory: a refused insert leaves the other rows of its change",
        "stores/memory/store.py",
        "for table, key, row in reversed(undo):",
        "for table, key, row in ():",
        VERDICTS,
    ),
    Fault(
        "sqlite: a part that collides leaves what it wrote before",
        "stores/sqlite/writes.py",
        'db.execute("ROLLBACK TO part")',
        "pass",
        VERDICTS,
    ),
    Fault(
        "sqlite: a collision fails the whole batch",
        "stores/sqlite/connection_thread.py",
        "if not job.fall_back():",
        "if True:",
        VERDICTS,
    ),
    Fault(
        "postgres: a batch whose first half was written is reported as not written",
        "stores/postgres/store.py",
        "source=error.source, in_doubt=True) from error",
        "source=error.source, in_doubt=False) from error",
        "tests/stores/postgres/test_pool.py"
        "::test_a_connection_lost_between_the_halves_of_a_batch_leaves_it_in_doubt_if_anything_was_written",
    ),
    Fault(
        "sqlite: a search ends when its budget is spent",
        "stores/sqlite/reads.py",
        "return SearchPage.of(scan, _scan_rows(db, queue_ids, part), last_read)",
        "return SearchPage.of(scan, _scan_rows(db, queue_ids, part), None)",
        "tests/stores/contract/test_search.py",
    ),
    Fault(
        "memory: the revision is not compared",
        "stores/memory/store.py",
        "return row.revision == guard.revision and (",
        "return (",
        GUARDS,
    ),
    Fault(
        "memory: a row that must be absent may exist",
        "stores/memory/store.py",
        "return row is None and guard.revision is None",
        "return guard.revision is None",
        GUARDS,
    ),
    Fault(
        "memory: a change is committed before its `not_before`",
        "stores/memory/store.py",
        "if change.not_before is not None and now < change.not_before:",
        "if change.not_before is not None and now < 0:",
        GUARDS,
    ),
    Fault(
        "memory: a guard does not compare the epoch",
        "stores/memory/store.py",
        "row.lease_id != check.lease_id or row.lease_epoch != check.lease_epoch or",
        "row.lease_id != check.lease_id or",
        GUARDS,
    ),
    Fault(
        "memory: a claim ignores grants",
        "stores/memory/store.py",
        "if granted_until is None or granted_until <= now:",
        "if True:",
        TAKE,
    ),
    Fault(
        "memory: the feed skips an event between two pages",
        "stores/memory/store.py",
        "return FeedPage(events, events[-1].position if events else after, has_gap)",
        "return FeedPage(events, events[-1].position + 1 if events else after, has_gap)",
        AGREEMENT,
    ),
    Fault(
        "a renewal does not compare the epoch",
        "rules/execution/lease.py",
        '            "lease_epoch": Parameter("lease_epoch"),\n',
        "",
        LEASES,
    ),
    Fault(
        "memory: a renewal does not check the condition of its template",
        "model/change.py",
        "getattr(row, name) == evaluate(value, row, parameters)",
        "getattr(row, name) == getattr(row, name)",
        LEASES,
    ),
    Fault(
        "sqlite: a renewal does not check the condition of its template",
        "stores/sqlite/statements.py",
        'f"r.{name} IS {_value_sql(value, sql)}"',
        'f"r.{name} IS r.{name}"',
        LEASES,
    ),
    Fault(
        "sqlite: the revision of a leased row is not compared",
        "stores/sqlite/statements.sql",
        "   AND (r.revision IS NOT g.column{revision}\n        OR r.lease_id",
        "   AND (r.lease_id",
        GUARDS,
    ),
    Fault(
        "sqlite: a claim ignores grants",
        "stores/sqlite/statements.sql",
        "WHERE line = ? AND (granted_until IS NULL OR granted_until <= ?)",
        "WHERE line = ? AND (granted_until IS NULL OR granted_until <= ? OR 1)",
        TAKE,
    ),
    Fault(
        "postgres: the expected columns of each root are not compared",
        "stores/postgres/commit/fragments.py",
        'f\'t."{name}" is not distinct from {params[f"expected {name}"]}\'',
        'f\'t."{name}" is null or {params[f"expected {name}"]} is null or true\'',
        GUARDS,
    ),
    Fault(
        "sqlite: the expected columns of each root are compared only if they are not null",
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
        "postgres: a row that must be absent may exist",
        "stores/postgres/commit/fragments.py",
        "t.found is null as holds",
        "true as holds",
        GUARDS,
    ),
    Fault(
        "postgres: a renewal does not check the condition of its template",
        "stores/postgres/claim.py",
        "is not distinct from {value}'",
        'is not distinct from e."{name}"\'',
        LEASES,
    ),
    Fault(
        "postgres: a claim starts a new attempt instead of resuming",
        "stores/postgres/commit/fragments.py",
        "is null then {otherwise} else {then} end'",
        "is null then {then} else {then} end'",
        TAKE,
    ),
    Fault(
        "postgres: a commit claims its own row although the ready queue is not empty",
        "stores/postgres/claim.sql",
        "    select not exists (\n",
        "    select true or not exists (\n",
        COMMIT_AND_CLAIM,
    ),
    Fault(
        "postgres: other columns of a change are lost when its row is claimed with the commit",
        "stores/postgres/commit/claim.py",
        "    if not claim_columns(request.template).overwritten >= set(names):\n        return None\n",
        "",
        COMMIT_AND_CLAIM,
    ),
)
