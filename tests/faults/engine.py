"""Slips in how decisions are carried: a look too few, an answer that goes astray."""

from __future__ import annotations

from tests.faults.fault import Fault

LIVES = "tests/machine/test_oracle.py::test_a_long_life_goes_as_the_second_telling_says"
FLAKY = "tests/machine/test_oracle.py::test_lost_requests_and_answers_change_nothing_that_anybody_sees"
LAPSED = (
    "tests/scenarios/test_ex_scheduling.py"
    "::test_however_many_leases_have_lapsed_before_it_the_best_of_the_lane_is_taken_over"
)

ENGINE = (
    Fault(
        "a report that arrives late is counted again",
        "engine/chains.py",
        "doubts.append((change, answers))",
        "pass",
        "tests/engine/test_lost_limit_answers.py::test_what_got_lost_once_happens_once",
    ),
    Fault(
        "sleepers that need too much hide the others",
        "engine/waiting.py",
        "< len(rows)\n            if len(rows) < PAGE:",
        "< len(rows)\n            if len(rows) < PAGE or left:",
        "tests/scenarios/test_sleeping_late.py",
    ),
    Fault(
        "a filter does not hold for suspensions",
        "engine/wait_sweeps.py",
        'row=Suspension, owner="execution_id")',
        "row=Suspension)",
        "tests/scenarios/test_filters.py",
    ),
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
    Fault(
        "a child that very many read goes though its parent will come to it again",
        "engine/purging.py",
        " or any(one and retention.needs(one[0], row) for one in named)",
        "",
        "tests/scenarios/test_flow_retention.py::test_a_child_that_very_many_read_is_kept_for_its_parent_too",
    ),
    Fault(
        "a sibling that was replayed is counted by its former end",
        "engine/folding.py",
        "        if dependency.revision != one.revision:\n            return None\n",
        "",
        "tests/engine/test_unneeded_siblings.py",
    ),
    Fault(
        "a sweep drains what a dead process has cancelled and not counted",
        "engine/cancelling.py",
        "            await self.count_unnoted(child)\n",
        "",
        "tests/engine/test_unneeded_siblings.py",
    ),
    Fault(
        "a reconciler drains what a dead process has cancelled and not counted",
        "engine/flow_cancels.py",
        "            await self.cancelling.count_unnoted(child)\n",
        "            pass\n",
        "tests/engine/test_unneeded_siblings.py",
    ),
    Fault(
        "a reconciler counts for a join that has flagged nobody",
        "engine/flow_cancels.py",
        "if (await self.load((Want(PendingCancelGroup, child),))).rows[0]:",
        "if True:",
        "tests/engine/test_unneeded_siblings.py",
    ),
    Fault(
        "a join is drained though its ends cannot be counted",
        "engine/cancelling.py",
        "            if fold.refused is not None:\n",
        "            if False:\n",
        "tests/engine/test_unneeded_siblings.py",
    ),
    Fault(
        "of many edges into one child only the first ones are counted",
        "engine/folding.py",
        "                if not todo[fold.child]:\n                    del todo[fold.child]\n",
        "                del todo[fold.child]\n",
        "tests/scenarios/test_flow_cascade.py"
        "::test_a_cascade_resolves_every_edge_into_one_child_however_few_it_looks_at_together",
    ),
    Fault(
        "of many edges away from one execution only the first page is read",
        "engine/dispatch.py",
        "        if len(page) < PAGE:\n            break\n",
        "        break\n",
        "tests/scenarios/test_flow_cascade.py::test_a_cascade_reads_the_edges_of_each_level_to_the_last_page",
    ),
    Fault(
        "of joins that wait since one instant only the first page is ever looked at",
        "engine/flow_sweeps.py",
        'Rotation(EdgeGroup, "waiting_since", ("flow_id", "downstream_execution_id"))',
        'Rotation(EdgeGroup, "waiting_since", ("flow_id",))',
        "tests/scenarios/test_flow_cascade.py::test_s_092_blocked_items_behind_a_full_batch_are_not_starved",
    ),
    Fault(
        "a member that is claimed when it is about to be cancelled runs on",
        "engine/cancelling.py",
        "                left.append(name)  # it moved meanwhile: look again\n",
        "                pass\n",
        "tests/engine/test_flow_deaths.py"
        "::test_members_that_are_claimed_when_they_are_about_to_be_cancelled_are_cancelled_all_the_same",
    ),
)
