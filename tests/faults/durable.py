"""Faults in durable functions: branches, remembered failures, left operations, budgets and progress."""

from __future__ import annotations

from tests.faults.fault import Fault

RESERVATIONS = "tests/sdk/durable/limits/test_reservations.py"

DURABLE = (
    Fault(
        "tasks of a durable function share their names",
        "sdk/durable/branches.py",
        "name = self.maker.name if self.is_own and by_arrival else",
        "name = self.maker.name if self.is_own else",
        "tests/sdk/durable/branches/test_own_tasks.py::test_two_tasks_keep_their_own_sleeps",
    ),
    Fault(
        "a run parks under a task that works",
        "sdk/durable/branches.py",
        "        return self.active > 0 or any(branch.is_pausing for branch in self.living)\n",
        "        return any(branch.is_pausing for branch in self.living)\n",
        "tests/sdk/durable/branches/test_own_tasks.py::test_a_member_of_gather_that_works_long_is_waited_for",
    ),
    Fault(
        "a failure is not recorded when the function moves past it",
        "sdk/durable/attempt.py",
        "        if pending:\n            await self._move_past(branch, pending)\n",
        "",
        "tests/sdk/durable/test_remembered_failures.py::test_a_saga_that_rolled_back_never_books_again",
    ),
    Fault(
        "an operation of another branch records a failure that ends the attempt",
        "sdk/durable/attempt.py",
        "            await self._wait_for_unwinding()\n",
        "",
        "tests/sdk/programs/test_random_programs.py::test_a_program_keeps_its_promise",
    ),
    Fault(
        "an operation records a failure that came after it",
        "sdk/durable/attempt.py",
        "            await self.record_pending(pending)\n",
        "            await self.record_pending(self.ledger.pending)\n",
        "tests/sdk/programs/test_random_programs.py::test_a_program_keeps_its_promise",
    ),
    Fault(
        "a failure that leaves a reservation counts as passed meanwhile",
        "sdk/durable/budgets.py",
        "                        with durable.releasing():\n",
        "                        if True:\n",
        "tests/sdk/programs/test_random_programs.py::test_a_program_keeps_its_promise",
    ),
    Fault(
        "a failure counts as passed while its thread has yet to raise it",
        "sdk/durable/attempt.py",
        "                await self._wait_for_threads()\n",
        "                pass\n",
        "tests/sdk/durable/test_remembered_failures.py",
    ),
    Fault(
        "a worker that stalled until its lease had expired begins the handler",
        "sdk/worker/runner.py",
        "        return self._lease_expires_at(claimed.lease_id) <= now\n",
        "        return False\n",
        "tests/sdk/programs/test_random_programs.py"
        "::test_a_worker_that_stalls_after_a_lost_reply_to_its_claim_does_not_begin_the_run",
    ),
    Fault(
        "a worker forgets the store's time that it knew before a late reply",
        "sdk/worker/runner.py",
        "now = max(self._engine.estimate.now(), then_ms + int((now_s - then_s) * 1000))",
        "now = self._engine.estimate.now()",
        "tests/sdk/worker/test_leases.py::test_a_late_reply_to_the_claim_does_not_hide_that_the_lease_has_expired",
    ),
    Fault(
        "a run parks although a task began a pause while it was about to",
        "sdk/durable/parker.py",
        "not (await self._is_settled() and self._is_blocked())",
        "not await self._is_settled()",
        "tests/sdk/programs/test_random_programs.py::test_a_program_keeps_its_promise",
    ),
    Fault(
        "ends of members of a race do not count while a failure unwinds",
        "sdk/durable/attempt.py",
        "        for task in tasks:\n            task.add_done_callback(self._count_ended)\n",
        "",
        "tests/sdk/programs/test_random_programs.py::test_a_program_keeps_its_promise",
    ),
    Fault(
        "a function continues after a crash in the cleanup of a cancelled member",
        "sdk/durable/attempt.py",
        "                raise end\n",
        "                pass\n",
        "tests/sdk/durable/test_cleanups.py::test_a_step_in_the_cleanup_of_a_cancelled_member_runs",
    ),
    Fault(
        "a cancelled branch waits on",
        "sdk/durable/parker.py",
        "        if not wait.branch.may_wait:",
        "        if False:",
        "tests/sdk/programs/test_random_programs.py::test_a_program_keeps_its_promise",
    ),
    Fault(
        "a request to cancel the task that a task group left counts as the worker's, for what is left",
        "sdk/durable/attempt.py",
        "[] if self.branches.is_ending() else",
        "[] if getattr(self.branches.root.task, 'cancelling', int)() else",
        "tests/sdk/programs/test_random_programs.py::test_a_program_keeps_its_promise",
    ),
    Fault(
        "a request to cancel the task that a task group left counts as the worker's, for the end of the attempt",
        "sdk/worker/runner.py",
        "return attempt.is_cancelled or worker is None",
        "return bool(asyncio.current_task().cancelling()) or worker is None",
        "tests/sdk/worker/test_worker.py::test_a_cancelled_future_after_a_failed_task_group_is_a_failure_of_the_attempt",
    ),
    Fault(
        "a run parks while a reservation is given back after a failure",
        "sdk/durable/budgets.py",
        "                    async with durable.parker.without_parking():\n                        await self._count_un",
        "                    if True:\n                        await self._count_un",
        "tests/sdk/programs/test_random_programs.py::test_a_program_keeps_its_promise",
    ),
    Fault(
        "the tries of a step are forgotten",
        "sdk/durable/step_execution.py",
        "            self._tries = msgspec.json.decode(tries.result, type=Tries)\n",
        "            pass\n",
        "tests/sdk/durable/test_step_options.py::test_a_kill_between_two_tries_loses_no_count",
    ),
    Fault(
        "a left receive keeps its gate",
        "sdk/durable/attempt.py",
        "            self.note_left(branch, (args.name, 0), is_gate=True)\n",
        "",
        "tests/sdk/durable/test_left_operations.py::test_a_receive_that_was_left_swallows_nothing",
    ),
    Fault(
        "a branch that ends before a replay comes to its wait keeps the gate",
        "sdk/durable/attempt.py",
        "            self.note_left(branch, (gate, 0), is_gate=True)\n        is_cancelled",
        "            pass\n        is_cancelled",
        "tests/sdk/durable/test_left_operations.py"
        "::test_a_wait_to_which_a_replay_does_not_come_before_it_is_left_swallows_nothing",
    ),
    Fault(
        "the loser of a race keeps its message",
        "sdk/durable/attempt.py",
        "            self._last_received[branch] = args.name\n",
        "            pass\n",
        "tests/sdk/durable/test_left_operations.py::test_the_message_of_a_loser_that_was_ready_too_is_not_lost",
    ),
    Fault(
        "a branch that was cancelled between two operations is not left",
        "sdk/durable/attempt.py",
        "            self.note_left(branch, (branch.name, 0), is_gate=False)\n",
        "            pass\n",
        "tests/sdk/durable/test_left_operations.py"
        "::test_a_branch_that_was_cancelled_between_two_operations_comes_to_no_other_one_in_a_replay",
    ),
    Fault(
        "a race that failed does not record its winner",
        "sdk/durable/races.py",
        "            durable.note_ended(branch, place, result)\n",
        "            pass\n",
        "tests/sdk/durable/test_left_operations.py::test_a_race_whose_winner_failed_has_no_other_winner_in_a_replay",
    ),
    Fault(
        "a race does not record the failures that its winner caught",
        "sdk/durable/races.py",
        "            await durable.record_pending(durable.pending_in(branches[number]))\n",
        "",
        "tests/sdk/durable/test_left_operations.py"
        "::test_a_failure_that_the_winner_of_a_race_caught_is_recorded_with_the_race",
    ),
    Fault(
        "a parent asks again how its child ended",
        "sdk/durable/child_ends.py",
        "    if (memo := durable.ledger.ends.get(place)) is not None:\n",
        "    if (memo := None) is not None:\n",
        "tests/sdk/durable/test_children.py"
        "::test_a_child_that_failed_has_failed_for_good_for_a_parent_that_moved_past_it",
    ),
    # Budgets and progress of durable functions.
    Fault(
        "the key of a spend is kept for a day only",
        "rules/limits/usage.py",
        "DEDUP_TTL_MS if report.acknowledged is None else UNACKNOWLEDGED_TTL_MS",
        "DEDUP_TTL_MS",
        f"{RESERVATIONS}::test_a_spend_whose_record_was_lost_is_not_counted_again_after_25_hours",
    ),
    Fault(
        "a worker that stops gives a reservation back",
        "sdk/durable/budgets.py",
        "self.durable.is_released or self.continues_elsewhere",
        "self.durable.is_released",
        f"{RESERVATIONS}::test_workers_that_stop_ten_times_in_a_reservation_spend_it_once",
    ),
    Fault(
        "a former holder refunds a reservation that another one has taken up",
        "rules/limits/reservation.py",
        "row.epoch > epoch",
        "row.epoch < epoch",
        "tests/rules/limits/test_reservations.py",
    ),
    Fault(
        "a block that was left with a failure is reserved again by a replay",
        "sdk/durable/budgets.py",
        "                    durable.note_ended(branch, place)\n",
        "                    pass\n",
        f"{RESERVATIONS}::test_a_replay_does_not_reserve_again_what_was_given_back",
    ),
    Fault(
        "a spend inside a step is recorded",
        "sdk/durable/budgets.py",
        "return is_in_step() and not self.durable.branches.by_arrival",
        "return False",
        f"{RESERVATIONS}::test_five_failed_runs_of_a_step_spend_what_five_calls_spent",
    ),
    Fault(
        "a replay reports progress again",
        "sdk/durable/output.py",
        "                if number < self._reported.get(branch, 0):\n                    return\n",
        "",
        "tests/sdk/durable/test_progress.py::test_progress_never_goes_back_after_a_wait",
    ),
)
