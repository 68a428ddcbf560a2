"""The faults: each a piece of text in one file, what it becomes, and the tests that have to notice.

Most are slips that any of us could make: a guard forgotten, a comparison off by one, an index entry left behind. A
patch that no longer applies fails a quick test; then look whether the fault has moved or has become impossible.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SOURCE = Path("src/flowfabric")

LIVES = "tests/machine/test_oracle.py::test_a_long_life_goes_as_the_second_telling_says"
FLAKY = "tests/machine/test_oracle.py::test_lost_requests_and_answers_change_nothing_that_anybody_sees"
AGREEMENT = "tests/machine/test_agreement.py::test_a_long_life_is_the_same_on_every_store"
TAKE = "tests/machine/test_take.py"
FOUND = "tests/machine/test_found.py"
GUARDS = "tests/stores/test_contract_guards.py"
HANDING = "tests/stores/test_contract_handing.py"
LEASES = "tests/stores/test_contract_leases.py"
RACES = "tests/chaos/test_forced_races.py"
LAPSED = (
    "tests/scenarios/test_ex_scheduling.py"
    "::test_however_many_leases_have_lapsed_before_it_the_best_of_the_lane_is_taken_over"
)
WAITS = "tests/scenarios/test_ss_races.py"
ANEW = "tests/scenarios/test_gates_anew.py"
UNSEEN = "tests/engine/test_flow_dispatch.py"
SIGNALS = "tests/scenarios/test_ss_prose_signals.py"
STANDS = "tests/rules/test_guards.py"


class Fault(NamedTuple):
    """One slip: in `file`, the text `old` (which stands there once) becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    noticed_by: str

    def applied(self, text: str) -> str:
        """The file with the fault in it; an error when the text has moved on."""
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"{self.name}: its text stands {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


FAULTS = (
    # -- rules
    Fault(
        "a lapse is marked though the lease was renewed meanwhile",
        "rules/lease.py",
        "guards=(seen(row, lapsed(row)),)",
        "guards=(seen(row),)",
        STANDS,
    ),
    Fault(
        "a delayed execution is promoted whatever became of it meanwhile",
        "rules/delay.py",
        "Change(guards=(seen(row),), writes=(step.moved(row, fields),), not_before=row.delay_until)",
        "Change(guards=(), writes=(step.moved(row, fields),), not_before=row.delay_until)",
        STANDS,
    ),
    Fault(
        "work that another worker took over is ended at its cap",
        "rules/reclaim.py",
        "    if row is None or not is_reclaimable(row):\n        return Decision(None)\n",
        "    if row is None:\n        return Decision(None)\n",
        STANDS,
    ),
    Fault(
        "of many that are created together each gets the first one's input",
        "rules/create.py",
        "kept = [one or None for one in inputs]",
        "kept = [inputs[0] or None for _ in inputs]",
        "tests/engine/test_bulk.py::test_each_of_many_that_are_written_as_one_change_keeps_its_own_input",
    ),
    Fault(
        "a worker that parks does not notice a signal that came in between",
        "rules/parking.py",
        "guards = (seen(row, live(row)), waits.guard_of(root, row.execution_id))",
        "guards = (seen(row, live(row)),)",
        "tests/rules/test_waits_guards.py",
    ),
    Fault(
        "an estimate of the time that runs ahead ends a wait too early",
        "rules/resuming.py",
        "msgspec.structs.replace(change, not_before=root.timeout_at)",
        "change",
        "tests/rules/test_waits_guards.py",
    ),
    Fault(
        "two processes create with one key at the same time",
        "rules/create.py",
        "        guards += (Guard(IdempotencyKey, (ask.partition, ask.digest), revision),)\n",
        "",
        "tests/scenarios/test_ex_create.py::test_ex_011_a_key_that_another_process_uses_meanwhile_is_used_once",
    ),
    Fault(
        "an attempt whose time has run out has no timer when it goes on",
        "rules/step.py",
        "max(1, row.attempt_timeout_at - now)",
        "max(0, row.attempt_timeout_at - now)",
        "tests/scenarios/test_ex_cancel_expire.py"
        "::test_ex_060_time_that_has_run_out_is_not_forgotten_when_the_work_is_put_away",
    ),
    Fault(
        "an estimate of the time that runs ahead times an attempt out too early",
        "rules/expiry.py",
        "change.events, not_before=instant)",
        "change.events)",
        STANDS,
    ),
    Fault(
        "what was blocked while it was granted stays blocked",
        "rules/claim.py",
        "    if _is_route_blocked(row):\n        patch =",
        "    if False:\n        patch =",
        "tests/scenarios/test_ex_scheduling.py"
        "::test_ex_027_work_that_is_blocked_by_route_while_it_is_granted_is_unblocked_with_its_grant",
    ),
    Fault(
        "a sibling is cancelled as if nobody had claimed it",
        "rules/cancel.py",
        "AS_BORN = Like(UNSTARTED,",
        "AS_BORN = Like({},",
        UNSEEN,
    ),
    Fault(
        "a gate of this life opens the links of the life before",
        "rules/waits.py",
        "holds = gate is not None and own and not gate_is_past(gate, now)",
        "holds = gate is not None and not gate_is_past(gate, now)",
        ANEW,
    ),
    Fault(
        "a waitpoint that begins anew remembers the signals of before",
        "rules/shelving.py",
        "[Delete(Signal, key), Delete(Remembered, key), Put(one)]",
        "[Put(one)]",
        ANEW,
    ),
    Fault(
        "a vote is taken whatever it says",
        "rules/signals.py",
        "    if wrong := asking.unfit(row, waitpoint, ask.payload):\n        return refuse(wrong)\n",
        "",
        ANEW,
    ),
    Fault(
        "a suspend does not notice a signal that came meanwhile",
        "rules/suspending.py",
        "waits.guard_of(scene.root, row.execution_id)),\n        writes=(\n            shelving",
        "),\n        writes=(\n            shelving",
        WAITS,
    ),
    Fault(
        "a signal is recorded before its key is looked for",
        "rules/signals.py",
        "if ask.dedups and kept is not None and kept.expires_at > now:",
        "if False and kept is not None:",
        SIGNALS,
    ),
    Fault(
        "a claimed execution keeps its place in the line",
        "rules/lease.py",
        '    "blocking_text": None,\n    "line": None,\n',
        '    "blocking_text": None,\n',
        LIVES,
    ),
    Fault(
        "a lease lives one millisecond too long",
        "rules/lease.py",
        "row.lease_expires_at is not None and row.lease_expires_at <= now",
        "row.lease_expires_at is not None and row.lease_expires_at < now",
        LIVES,
    ),
    Fault(
        "an acquired lease keeps the epoch of the one before",
        "rules/lease.py",
        "lease_epoch=row.lease_epoch + 1,",
        "lease_epoch=row.lease_epoch,",
        LIVES,
    ),
    Fault(
        "a stale holder hears stale_lease although the lease has lapsed",
        "rules/lease.py",
        "    if has_lapsed(row, now):\n        return Decision(errors.LeaseExpired",
        "    if has_lapsed(row, now) and fence.lease_id == row.lease_id:\n        return Decision(errors.LeaseExpired",
        LIVES,
    ),
    Fault(
        "the end of a life is not told",
        "rules/step.py",
        "        events=(completion(row, outcome, released=released if was_active else None, details=details),),\n",
        "",
        LIVES,
    ),
    Fault(
        "a grant outlives its execution",
        "rules/step.py",
        '    "granted_until",\n    "grant",\n    "current_suspension_id",\n',
        '    "current_suspension_id",\n',
        LIVES,
    ),
    Fault(
        "one retry too many",
        "rules/policy.py",
        "retry_count >= retry.max_retries",
        "retry_count > retry.max_retries",
        LIVES,
    ),
    Fault(
        "one takeover too many",
        "rules/reclaim.py",
        ">= cap:\n        return cap_reached(row, cap)\n    return reclaimed(row, holder)",
        "> cap:\n        return cap_reached(row, cap)\n    return reclaimed(row, holder)",
        LIVES,
    ),
    Fault(
        "high priority comes last",
        "rules/place.py",
        "return -priority * (terms.ageing or PRIORITY_STEP)",
        "return priority * (terms.ageing or PRIORITY_STEP)",
        LIVES,
    ),
    Fault(
        "namespaces share their idempotency keys",
        "rules/create.py",
        'f"{len(self.namespace)}:{self.namespace}:{self.idempotency_key}"',
        'f"{self.idempotency_key}"',
        LIVES,
    ),
    Fault(
        "a lapse is marked again and again",
        "rules/lease.py",
        "    if row.ownership_state is OwnershipState.LEASE_EXPIRED_RECLAIMABLE:\n        return None\n    fields",
        "    fields",
        LIVES,
    ),
    Fault(
        "a replay keeps the old result",
        "rules/replay.py",
        "= (step.moved(row, fields), Delete(Result, (row.execution_id,)))",
        "= (step.moved(row, fields),)",
        LIVES,
    ),
    Fault(
        "a parked attempt gets its whole time again",
        "rules/step.py",
        "next_timeout_ms=remaining_ms(row, now),",
        "next_timeout_ms=decode_terms(row.terms).attempt_timeout_ms,",
        LIVES,
    ),
    Fault(
        "a completion is written on a lease that has lapsed meanwhile",
        "rules/finish.py",
        '        released="completed",\n        guard=seen(row, live(row)),\n',
        '        released="completed",\n        guard=seen(row),\n',
        LIVES,
    ),
    # -- limits
    Fault(
        "a hard limit may be exceeded by one",
        "rules/budgets.py",
        "counted(row) + amount > row.hard_limit:",
        "counted(row) + amount > row.hard_limit + 1:",
        "tests/rules/test_spending.py",
    ),
    Fault(
        "a report that arrives late is counted again",
        "engine/chains.py",
        "doubts.append((change, answers))",
        "pass",
        "tests/engine/test_lost_limit_answers.py::test_what_got_lost_once_happens_once",
    ),
    Fault(
        "a late word of room wakes from another wait",
        "rules/sleeping.py",
        "is not LifecyclePhase.SUSPENDED or need not in shelving.needs(root):",
        "is not LifecyclePhase.SUSPENDED:",
        "tests/scenarios/test_sleeping_late.py",
    ),
    Fault(
        "sleepers that need too much hide the others",
        "engine/waiting.py",
        "(not freed and not sleeps)",
        "not freed",
        "tests/scenarios/test_sleeping_late.py",
    ),
    Fault(
        "the end of an earlier life takes the slot of a later one",
        "rules/admission.py",
        "held.life > life)",
        "held.life > life + 1)",
        "tests/rules/test_admission.py",
    ),
    Fault(
        "a window keeps a request for a millisecond too long",
        "rules/admission.py",
        "if key[0] == dimension and one.admitted_at > passed]",
        "if key[0] == dimension and one.admitted_at >= passed]",
        "tests/scenarios/test_s_quotas.py",
    ),
    Fault(
        "a filter does not hold for suspensions",
        "engine/wait_sweeps.py",
        'row=Suspension, owner="execution_id")',
        "row=Suspension)",
        "tests/scenarios/test_filters.py",
    ),
    # -- engine
    Fault(
        "renewals crowd the rest out of a history",
        "engine/reads.py",
        "self.store.history(execution, Topic.LEASE, HISTORY_KEPT, RENEWED)",
        "self.store.history(execution, Topic.LEASE, HISTORY_KEPT)",
        "tests/scenarios/test_ex_leases.py",
    ),
    Fault(
        "a lane is listed although nothing was created on it",
        "engine/bulk.py",
        "    trusting = trusting and core.knows_lane(ask.lane_id)\n",
        "",
        "tests/scenarios/test_ex_create.py",
    ),
    Fault(
        "a refusal decided on a remembered row is final",
        "engine/core.py",
        "            if not fresh and (decision.change is None or isinstance(decision.answer, errors.FabricError)):\n",
        "            if not fresh and decision.change and isinstance(decision.answer, errors.FabricError):\n",
        LIVES,
    ),
    Fault(
        "a lost answer is taken for a no",
        "engine/core.py",
        '            if doubt := doubtful.get(getattr(row, "revision", 0)):\n',
        '            if doubt := {}.get(getattr(row, "revision", 0)):\n',
        FLAKY,
    ),
    Fault(
        "a claim does not look for what lapsed",
        "engine/lines.py",
        "        await asyncio.gather(self.mark_lapsed_leases(lane_id), self.hear_of_lane(lane_id))\n",
        "        await self.hear_of_lane(lane_id)\n",
        LIVES,
    ),
    Fault(
        "a claim looks at the first lapsed leases only",
        "engine/lines.py",
        "if len(due.rows) < LAPSED_BATCH or not any(marks):",
        "if True:",
        LAPSED,
    ),
    # -- stores
    Fault(
        "memory: the revision is not compared",
        "stores/memory.py",
        "return row.revision == guard.revision and (",
        "return (",
        GUARDS,
    ),
    Fault(
        "memory: what must be absent may be there",
        "stores/memory.py",
        "return row is None and guard.revision is None",
        "return guard.revision is None",
        GUARDS,
    ),
    Fault(
        "memory: a change comes before its time",
        "stores/memory.py",
        "if change.not_before is not None and now < change.not_before:",
        "if change.not_before is not None and now < 0:",
        GUARDS,
    ),
    Fault(
        "memory: a renewal does not ask for the epoch",
        "stores/memory.py",
        "row.lease_id != check.lease_id or row.lease_epoch != check.lease_epoch or",
        "row.lease_id != check.lease_id or",
        LEASES,
    ),
    Fault(
        "memory: a take ignores grants",
        "stores/memory.py",
        "if granted_until is None or granted_until <= now:",
        "if True:",
        TAKE,
    ),
    Fault(
        "memory: the feed leaves an entry out between two pages",
        "stores/memory.py",
        "return FeedPage(events, events[-1].position if events else after, lost)",
        "return FeedPage(events, events[-1].position + 1 if events else after, lost)",
        AGREEMENT,
    ),
    Fault(
        "a take does not raise the epoch",
        "stores/base.py",
        '"lease_epoch": row.lease_epoch + 1,',
        '"lease_epoch": row.lease_epoch,',
        TAKE,
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
        "an end that met no gate lets one open that was decided before it",
        "rules/parking.py",
        "        if row.lifecycle_phase is LifecyclePhase.ACTIVE:\n",
        "        if row.lifecycle_phase is LifecyclePhase.SUSPENDED:\n",
        "tests/scenarios/test_children.py::test_a_child_that_ends_while_the_wait_for_it_is_on_its_way_counts",
    ),
    Fault(
        "what each root is supposed to hold of its own is not compared",
        "stores/postgres/pieces.py",
        """f't."{column}" is not distinct from {given[f"own {column}"]}'""",
        """f't."{column}" is null or {given[f"own {column}"]} is null or true'""",
        GUARDS,
    ),
    Fault(
        "what each root is supposed to hold of its own is compared where it is set",
        "stores/sqlite/sql.py",
        'f"r.{name} IS g.column{place}"',
        'f"coalesce(r.{name} = g.column{place}, true)"',
        GUARDS,
    ),
    Fault(
        "postgres: the revision is not compared",
        "stores/postgres/pieces.py",
        "f\"{given['revision']} = t.revision\"",
        "f\"{given['revision']} is not null\"",
        RACES,
    ),
    Fault(
        "postgres: what must be absent may be there",
        "stores/postgres/pieces.py",
        "t.found is null as holds",
        "true as holds",
        GUARDS,
    ),
    Fault(
        "postgres: a renewal does not ask for the epoch",
        "stores/postgres/take.sql",
        "              and e.lease_epoch = given.lease_epoch\n",
        "",
        LEASES,
    ),
    Fault(
        "postgres: a take continues no attempt, it begins a new one",
        "stores/postgres/take.sql",
        "attempt_resumed_at = case when e.next_type is null then c.now end,",
        "attempt_resumed_at = null,",
        TAKE,
    ),
    Fault(
        "postgres: work is handed over although somebody stands in line",
        "stores/postgres/take.sql",
        "    select not exists (\n",
        "    select true or not exists (\n",
        HANDING,
    ),
    Fault(
        "postgres: what a change writes beside the line is lost when its row is handed over",
        "stores/postgres/hand.py",
        "    if not replaced(becomes).issuperset(names):\n        return None\n",
        "",
        HANDING,
    ),
    Fault(
        "work of one lane is handed over though others have some, too",
        "engine/pulling.py",
        "if self._engine.store.in_order or len(orders) > 1:",
        "if self._engine.store.in_order:",
        "tests/engine/test_handing.py",
    ),
    Fault(
        "a lane in which all work is handed over is never looked around in",
        "engine/handing.py",
        "if not self.has_looked(lane):",
        "if False:",
        "tests/engine/test_handing.py",
    ),
)
