"""Faults in the engine: a missing check, a lost reply."""

from __future__ import annotations

from tests.faults.fault import Fault

LIVES = "tests/stateful/test_oracle.py::test_a_long_sequence_agrees_with_the_oracle"
FLAKY = "tests/stateful/test_oracle.py::test_lost_requests_and_replies_change_nothing_observable"
LAPSED = (
    "tests/scenarios/scheduling/test_claim_order.py"
    "::test_the_first_takeover_of_a_lane_is_found_behind_many_expired_leases"
)

ENGINE = (
    Fault(
        "an error after a lost reply says that nothing was written",
        "engine/runtime/runtime.py",
        "if unknown and not away.in_doubt:",
        "if False:",
        "tests/engine/runtime/test_unknown_outcomes.py",
    ),
    Fault(
        "an error after a lost reply to a change of an aggregate says that nothing was written",
        "engine/runtime/aggregate_repository.py",
        "if unknown and not away.in_doubt:",
        "if False:",
        "tests/engine/runtime/test_unknown_outcomes.py",
    ),
    Fault(
        "a report that arrives late is counted again",
        "engine/runtime/aggregate_repository.py",
        "unknown.append((change, answers))",
        "pass",
        "tests/engine/limits/test_lost_replies.py::test_a_limits_operation_that_was_lost_once_takes_effect_once",
    ),
    Fault(
        "a window is read from too late an instant",
        "engine/limits/quota_slots.py",
        "now - ask.window_ms, ask.rate_limit)",
        "now - ask.window_ms // 2, ask.rate_limit)",
        "tests/scenarios/limits/test_quotas.py::test_the_rate_limit_is_a_sliding_window",
    ),
    Fault(
        "expired reservations are not loaded, and count for ever",
        "engine/limits/aggregates.py",
        "if reservation.may_have_expired(state, now) else ()",
        "if state.root is None else ()",
        "tests/scenarios/limits/test_reservations.py::test_after_a_settlement_the_next_reservation_still_expires",
    ),
    Fault(
        "usage is drawn from a reservation that is not loaded",
        "engine/operations/limits.py",
        "wanted.append(Read(BudgetReservation, (*budget, reservation_id)))",
        "pass",
        "tests/engine/limits/test_reservation_model.py::test_decisions_on_the_rows_they_name_agree_with_a_model",
    ),
    Fault(
        "the slots of a quota are not loaded with it for readers",
        "engine/operations/overview.py",
        "load(keys, {key: (Read(QuotaSlot, key),) for key in keys})",
        "load(keys)",
        "tests/scenarios/scheduling/test_overview.py::test_quotas_show_their_window_and_holders",
    ),
    Fault(
        "the sweep deletes a request that was moved meanwhile",
        "rules/limits/quota.py",
        "if entry is None or entry.expires_at > now:",
        "if entry is None:",
        "tests/scenarios/limits/test_quotas.py::test_a_request_that_moves_while_it_is_swept_stays",
    ),
    Fault(
        "executions that need too much of a budget keep others blocked",
        "engine/limits/unblocker.py",
        "< len(rows)\n            if len(rows) < PAGE_SIZE:",
        "< len(rows)\n            if len(rows) < PAGE_SIZE or left:",
        "tests/scenarios/limits/test_late_budget_suspension.py",
    ),
    Fault(
        "a claim filter is not applied to suspensions",
        "engine/sweeps/catalog.py",
        'row=Suspension, owner="execution_id")',
        "row=Suspension)",
        "tests/scenarios/scheduling/test_claim_filters.py",
    ),
    Fault(
        "renewals displace other events from a history",
        "engine/operations/reads.py",
        "self.runtime.store.history(execution, Topic.LEASE, MAX_HISTORY_EVENTS, RENEWED)",
        "self.runtime.store.history(execution, Topic.LEASE, MAX_HISTORY_EVENTS)",
        "tests/scenarios/execution/test_leases.py",
    ),
    Fault(
        "a lane is listed although nothing was created on it",
        "engine/operations/create.py",
        "        is_absent = assume_absent and runtime.knows_lane(ask.lane_id)\n",
        "        is_absent = assume_absent\n",
        "tests/scenarios/execution/test_create.py",
    ),
    Fault(
        "a refusal decided on a cached row is final",
        "engine/runtime/runtime.py",
        "            if not fresh and (decision.change is None or isinstance(decision.answer, errors.FabricError)):\n",
        "            if not fresh and decision.change and isinstance(decision.answer, errors.FabricError):\n",
        LIVES,
    ),
    Fault(
        "a lost reply is treated as a refused commit",
        "engine/runtime/unknown_outcomes.py",
        '            if lost := unknown.get(getattr(row, "revision", 0)):\n',
        '            if lost := {}.get(getattr(row, "revision", 0)):\n',
        FLAKY,
    ),
    Fault(
        "a claim does not mark expired leases",
        "engine/claiming/ready_queues.py",
        "            await asyncio.gather(self.mark_expired_leases(lane_id), self.runtime.load_lane_queues(lane_id))\n",
        "        await self.runtime.load_lane_queues(lane_id)\n",
        LIVES,
    ),
    Fault(
        "a claim marks only the first batch of expired leases",
        "engine/claiming/ready_queues.py",
        "if len(due.rows) < EXPIRED_LEASES_BATCH or not any(marks):",
        "if True:",
        LAPSED,
    ),
    Fault(
        "a commit claims from one lane although others have work",
        "engine/claiming/poller.py",
        "if self.runtime.store.executes_in_order or len(orders) > 1:",
        "if self.runtime.store.executes_in_order:",
        "tests/engine/claiming/test_commit_and_claim.py",
    ),
    Fault(
        "a worker claims in parts, but only after its completions",
        "engine/claiming/poller.py",
        "if store.executes_in_order and not (store.claim_parts > 1 and self._found_many):",
        "if store.executes_in_order:",
        "tests/engine/claiming/test_claim_after_completion.py",
    ),
    Fault(
        "a lane whose work is all claimed with commits is never scanned",
        "engine/claiming/claim_on_commit.py",
        "if not self.queues.is_lane_fresh(lane):",
        "if False:",
        "tests/engine/claiming/test_commit_and_claim.py",
    ),
    Fault(
        "a child with very many readers is purged although its parent still needs it",
        "engine/retention/purger.py",
        " or any(retention.may_still_need(one, row) for one in named)",
        "",
        "tests/scenarios/flow/test_retention.py::test_a_child_with_many_readers_is_kept_for_its_parent",
    ),
    Fault(
        "a replayed sibling is counted by its former outcome",
        "engine/flows/join_resolver.py",
        "        if dependency.revision != edge.revision:\n            return None\n",
        "",
        "tests/engine/flows/test_unneeded_siblings.py",
    ),
    Fault(
        "a sweep drops the outcomes of siblings that a dead process cancelled",
        "engine/flows/bulk_cancel.py",
        "            await self.resolve_unrecorded_outcomes(child)\n",
        "",
        "tests/engine/flows/test_unneeded_siblings.py",
    ),
    Fault(
        "a reconciler drops the outcomes of siblings that a dead process cancelled",
        "engine/operations/flows.py",
        "            await self.bulk_canceller.resolve_unrecorded_outcomes(child)\n",
        "            pass\n",
        "tests/engine/flows/test_unneeded_siblings.py",
    ),
    Fault(
        "a reconciler resolves a join without pending sibling cancels",
        "engine/operations/flows.py",
        "if await load_one(self.runtime, PendingSiblingCancel, *child) is not None:",
        "if True:",
        "tests/engine/flows/test_unneeded_siblings.py",
    ),
    Fault(
        "a join is drained although its outcomes cannot be resolved",
        "engine/flows/bulk_cancel.py",
        "            if resolution.refused is not None:\n",
        "            if False:\n",
        "tests/engine/flows/test_unneeded_siblings.py",
    ),
    Fault(
        "of many edges into one child only the first ones are counted",
        "engine/flows/join_resolver.py",
        "                if not todo[downstream]:\n                    del todo[downstream]\n",
        "                del todo[downstream]\n",
        "tests/scenarios/flow/test_cascade.py::test_a_cascade_resolves_all_parallel_edges_in_small_batches",
    ),
    Fault(
        "of many edges from one execution only the first page is read",
        "engine/flows/completion_dispatcher.py",
        "        if len(page) < PAGE_SIZE:\n            break\n",
        "        break\n",
        "tests/scenarios/flow/test_cascade.py::test_a_cascade_reads_the_edges_of_each_level_to_the_last_page",
    ),
    Fault(
        "of joins that wait since the same instant only the first page is scanned",
        "engine/sweeps/flows.py",
        'RotatingScan(EdgeGroup, "waiting_since", ("flow_id", "downstream_execution_id"))',
        'RotatingScan(EdgeGroup, "waiting_since", ("flow_id",))',
        "tests/scenarios/flow/test_cascade.py::test_blocked_members_behind_a_full_batch_are_not_starved",
    ),
    Fault(
        "a member that is claimed while it is being cancelled keeps running",
        "engine/flows/bulk_cancel.py",
        "                left.append(execution_id)  # another writer was faster\n",
        "                pass\n",
        "tests/engine/flows/test_process_deaths.py"
        "::test_members_that_are_claimed_just_before_their_cancel_are_cancelled_too",
    ),
    Fault(
        "a bulk replay starts two lives after a crash",
        "engine/operations/executions.py",
        "if execution is not None and replay.is_life_over(execution, life):",
        "if False:",
        "tests/scenarios/lists/test_bulk_operations.py",
    ),
    Fault(
        "a bound token finds executions of a namespace that it names",
        "engine/validation/execution_filter.py",
        "return some if one is None else tuple(name for name in some if name == one)",
        "return some if one is None else (one,)",
        "tests/scenarios/lists/test_search.py",
    ),
    Fault(
        "a page that is not full says that it is complete",
        "engine/operations/search.py",
        "more is not None and len(page.found) < size,",
        "False,",
        "tests/scenarios/lists/test_search.py",
    ),
    Fault(
        "work that another transaction had locked waits for the next poll",
        "engine/claiming/fast_claims.py",
        "if claimed.has_locked and",
        "if False and",
        "tests/stores/postgres/test_races.py::TestAClaim::test_is_sent_again_when_the_transaction_that_locked_all_rows_has_ended",
    ),
)
