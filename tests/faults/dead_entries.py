"""Faults that let a read cost more and more beside an old snapshot: it steps over every row that was deleted since."""

from __future__ import annotations

from tests.faults.fault import Fault

BOUNDED = "tests/stores/postgres/test_bounded_reads.py"

DEAD_ENTRIES = (
    Fault(
        "claims during an old snapshot always read from the head of the queue",
        "stores/postgres/dead_entries.py",
        "            elif part is None and floor > LOWEST and entries > BLOAT_THRESHOLD + 4 * found:\n",
        "            elif False:\n",
        "tests/stores/postgres/test_dead_entries.py::test_a_claim_steps_over_a_bounded_number_of_entries",
    ),
    Fault(
        "a claim that met only locked rows takes its queue for drained",
        "stores/postgres/store.py",
        "is_drained = not (more or has_locked) and len(rows)",
        "is_drained = len(rows)",
        "tests/stores/postgres/test_dead_entries.py"
        "::test_a_claim_beside_dead_entries_returns_nothing_only_if_nothing_is_claimable",
    ),
    Fault(
        "rows of limits are found by key, the oldest version first",
        "stores/postgres/sql.py",
        "frozenset((Budget, BudgetDimension, QuotaPolicy))",
        "frozenset()",
        "tests/stores/postgres/test_bounded_reads.py"
        "::test_work_with_a_limit_reads_few_of_the_dead_versions_of_its_rows",
    ),
    Fault(
        "the doctor does not name who holds an old snapshot",
        "cli/commands/maintenance.py",
        "    if not reported:\n",
        "    if True:\n",
        "tests/cli/test_doctor.py::test_doctor_names_an_idle_transaction",
    ),
    Fault(
        "claims by plan always read from the heads of their queues",
        "stores/postgres/queue_reads.py",
        "        if not self.dead_entries.may_hide_rows(values):\n",
        "        if True:\n",
        f"{BOUNDED}::test_a_claim_by_plan_steps_over_a_bounded_number_of_entries",
    ),
    Fault(
        "the search for queues with work does not count what it steps over",
        "stores/postgres/queue_reads.py",
        "        if entries > BLOAT_THRESHOLD + 4 * len(ids) and self.dead_entries.affords_more:\n",
        "        if False:\n",
        f"{BOUNDED}::test_queues_with_work_are_found_in_a_bounded_number_of_entries",
    ),
    Fault(
        "lists of blocked work by prefix are always read whole",
        "stores/postgres/queue_reads.py",
        "        if self._gap_entries.get(prefix, 0) <= BLOAT_THRESHOLD and not self._tracked_names(prefix):\n",
        "        if True:\n",
        f"{BOUNDED}::test_lists_of_blocked_work_by_prefix_are_read_in_a_bounded_number_of_entries",
    ),
    Fault(
        "the search for due rows does not count what it steps over",
        "stores/postgres/store.py",
        "        self._dead_entries.record_scan(key, index_slice, ended - began, count, floor)\n",
        "",
        f"{BOUNDED}::test_due_rows_are_found_in_a_bounded_number_of_entries",
    ),
    Fault(
        "a decision about a quota loads all of its requests",
        "engine/limits/aggregates.py",
        "        return (Read(QuotaPolicy, key),)\n",
        "        return (Read(QuotaPolicy, key), Read(QuotaRequest, key))\n",
        f"{BOUNDED}::test_work_with_a_quota_steps_over_a_bounded_number_of_entries",
    ),
    Fault(
        "a decision about a budget loads all of its reservations",
        "engine/limits/aggregates.py",
        "        return (Read(BudgetReservation, state.key),) if reservation.may_have_expired(state, now) else ()\n",
        "        return (Read(BudgetReservation, state.key),)\n",
        f"{BOUNDED}::test_work_with_a_budget_steps_over_a_bounded_number_of_entries",
    ),
)
