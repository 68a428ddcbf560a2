"""Slips in what is decided: a guard forgotten, a comparison off by one, a field left behind."""

from __future__ import annotations

from tests.faults.fault import Fault

LIVES = "tests/machine/test_oracle.py::test_a_long_life_goes_as_the_second_telling_says"
WAITS = "tests/scenarios/test_ss_races.py"
ANEW = "tests/scenarios/test_gates_anew.py"
UNSEEN = "tests/engine/test_flow_dispatch.py"
SIGNALS = "tests/scenarios/test_ss_prose_signals.py"
STANDS = "tests/rules/test_guards.py"

RULES = (
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
    Fault(
        "a hard limit may be exceeded by one",
        "rules/budgets.py",
        "counted(row) + amount > row.hard_limit:",
        "counted(row) + amount > row.hard_limit + 1:",
        "tests/rules/test_spending.py",
    ),
    Fault(
        "a late word of room wakes from another wait",
        "rules/sleeping.py",
        "is not LifecyclePhase.SUSPENDED or need not in shelving.needs(root):",
        "is not LifecyclePhase.SUSPENDED:",
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
        "an end that met no gate lets one open that was decided before it",
        "rules/parking.py",
        "        if row.lifecycle_phase is LifecyclePhase.ACTIVE:\n",
        "        if row.lifecycle_phase is LifecyclePhase.SUSPENDED:\n",
        "tests/scenarios/test_children.py::test_a_child_that_ends_while_the_wait_for_it_is_on_its_way_counts",
    ),
)
