"""Slips in how decisions are carried: a look too few, an answer that goes astray."""

from __future__ import annotations

from tests.faults.fault import Fault

LIVES = "tests/stateful/test_oracle.py::test_a_long_sequence_agrees_with_the_oracle"
FLAKY = "tests/stateful/test_oracle.py::test_lost_requests_and_replies_change_nothing_observable"
LAPSED = (
    "tests/scenarios/scheduling/test_claim_order.py"
    "::test_however_many_leases_have_lapsed_before_it_the_best_of_the_lane_is_taken_over"
)

ENGINE = (
    Fault(
        "a report that arrives late is counted again",
        "engine/runtime/root_queue.py",
        "doubts.append((change, answers))",
        "pass",
        "tests/engine/limits/test_lost_replies.py::test_a_limits_operation_that_was_lost_once_takes_effect_once",
    ),
    Fault(
        "sleepers that need too much hide the others",
        "engine/limits/unblocker.py",
        "< len(rows)\n            if len(rows) < PAGE_SIZE:",
        "< len(rows)\n            if len(rows) < PAGE_SIZE or left:",
        "tests/scenarios/limits/test_late_budget_suspension.py",
    ),
    Fault(
        "a filter does not hold for suspensions",
        "engine/sweeps/suspensions.py",
        'row=Suspension, owner="execution_id")',
        "row=Suspension)",
        "tests/scenarios/scheduling/test_claim_filters.py",
    ),
    Fault(
        "renewals crowd the rest out of a history",
        "engine/operations/reads.py",
        "self.runtime.store.history(execution, Topic.LEASE, MAX_HISTORY_EVENTS, RENEWED)",
        "self.runtime.store.history(execution, Topic.LEASE, MAX_HISTORY_EVENTS)",
        "tests/scenarios/execution/test_leases.py",
    ),
    Fault(
        "a lane is listed although nothing was created on it",
        "engine/operations/bulk_create.py",
        "    assume_absent = assume_absent and core.knows_lane(ask.lane_id)\n",
        "",
        "tests/scenarios/execution/test_create.py",
    ),
    Fault(
        "a refusal decided on a remembered row is final",
        "engine/runtime/runtime.py",
        "            if not fresh and (decision.change is None or isinstance(decision.answer, errors.FabricError)):\n",
        "            if not fresh and decision.change and isinstance(decision.answer, errors.FabricError):\n",
        LIVES,
    ),
    Fault(
        "a lost answer is taken for a no",
        "engine/runtime/runtime.py",
        '            if doubt := doubtful.get(getattr(row, "revision", 0)):\n',
        '            if doubt := {}.get(getattr(row, "revision", 0)):\n',
        FLAKY,
    ),
    Fault(
        "a claim does not look for what lapsed",
        "engine/claiming/ready_queues.py",
        "            await asyncio.gather(self.mark_expired_leases(lane_id), self.runtime.load_lane_queues(lane_id))\n",
        "        await self.runtime.load_lane_queues(lane_id)\n",
        LIVES,
    ),
    Fault(
        "a claim looks at the first lapsed leases only",
        "engine/claiming/ready_queues.py",
        "if len(due.rows) < EXPIRED_LEASES_BATCH or not any(marks):",
        "if True:",
        LAPSED,
    ),
    Fault(
        "work of one lane is handed over though others have some, too",
        "engine/claiming/poller.py",
        "if self._engine.runtime.store.executes_in_order or len(orders) > 1:",
        "if self._engine.runtime.store.executes_in_order:",
        "tests/engine/claiming/test_commit_and_claim.py",
    ),
    Fault(
        "a lane in which all work is handed over is never looked around in",
        "engine/claiming/commit_and_claim.py",
        "if not self.is_lane_fresh(lane):",
        "if False:",
        "tests/engine/claiming/test_commit_and_claim.py",
    ),
    Fault(
        "a child that very many read goes though its parent will come to it again",
        "engine/operations/purging.py",
        " or any(\n            one and retention.may_still_need(one[0], row) for one in named\n        )",
        "",
        "tests/scenarios/flow/test_retention.py::test_a_child_that_very_many_read_is_kept_for_its_parent_too",
    ),
    Fault(
        "a sibling that was replayed is counted by its former end",
        "engine/flows/join_resolver.py",
        "        if dependency.revision != one.revision:\n            return None\n",
        "",
        "tests/engine/flows/test_unneeded_siblings.py",
    ),
    Fault(
        "a sweep drains what a dead process has cancelled and not counted",
        "engine/flows/bulk_cancel.py",
        "            await self.resolve_unrecorded_outcomes(child)\n",
        "",
        "tests/engine/flows/test_unneeded_siblings.py",
    ),
    Fault(
        "a reconciler drains what a dead process has cancelled and not counted",
        "engine/operations/flow_cancels.py",
        "            await self.bulk_canceller.resolve_unrecorded_outcomes(child)\n",
        "            pass\n",
        "tests/engine/flows/test_unneeded_siblings.py",
    ),
    Fault(
        "a reconciler counts for a join that has flagged nobody",
        "engine/operations/flow_cancels.py",
        "if (await self.runtime.load((Read(PendingSiblingCancel, child),))).rows[0]:",
        "if True:",
        "tests/engine/flows/test_unneeded_siblings.py",
    ),
    Fault(
        "a join is drained though its ends cannot be counted",
        "engine/flows/bulk_cancel.py",
        "            if fold.refused is not None:\n",
        "            if False:\n",
        "tests/engine/flows/test_unneeded_siblings.py",
    ),
    Fault(
        "of many edges into one child only the first ones are counted",
        "engine/flows/join_resolver.py",
        "                if not todo[fold.downstream]:\n                    del todo[fold.downstream]\n",
        "                del todo[fold.downstream]\n",
        "tests/scenarios/flow/test_cascade.py"
        "::test_a_cascade_resolves_every_edge_into_one_child_however_few_it_looks_at_together",
    ),
    Fault(
        "of many edges away from one execution only the first page is read",
        "engine/flows/completion_dispatcher.py",
        "        if len(page) < PAGE_SIZE:\n            break\n",
        "        break\n",
        "tests/scenarios/flow/test_cascade.py::test_a_cascade_reads_the_edges_of_each_level_to_the_last_page",
    ),
    Fault(
        "of joins that wait since one instant only the first page is ever looked at",
        "engine/sweeps/flows.py",
        'RotatingScan(EdgeGroup, "waiting_since", ("flow_id", "downstream_execution_id"))',
        'RotatingScan(EdgeGroup, "waiting_since", ("flow_id",))',
        "tests/scenarios/flow/test_cascade.py::test_blocked_items_behind_a_full_batch_are_not_starved",
    ),
    Fault(
        "a member that is claimed when it is about to be cancelled runs on",
        "engine/flows/bulk_cancel.py",
        "                left.append(name)  # it moved meanwhile: look again\n",
        "                pass\n",
        "tests/engine/flows/test_process_deaths.py"
        "::test_members_that_are_claimed_just_before_their_cancel_are_cancelled_too",
    ),
)
