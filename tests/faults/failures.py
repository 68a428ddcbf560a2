"""Faults that lose or repeat work after a failure of a server, a network, a clock or another process."""

from __future__ import annotations

from tests.faults.fault import Fault

QUEUES = "tests/engine/claiming/test_missing_queues.py"
QUEUE_NUMBERS = "tests/stores/postgres/test_queue_ids.py"
FAILOVER = "tests/chaos/test_failover.py"
FOREIGN = "tests/client/test_foreign_answers.py"
QUIET = "tests/sdk/worker/test_quiet_log.py"
PURGE = "tests/scenarios/flow/test_purge.py"
CLOCK = "tests/stores/sqlite/test_clock.py"

FAILURES = (
    # Queues and positions after a failover.
    Fault(
        "a commit does not check that its ready queue exists",
        "stores/postgres/queue_ids.py",
        "        return self._pool.has_own_sessions and self._ensured",
        "        return True or self._ensured",
        f"{QUEUE_NUMBERS}::test_a_commit_restores_the_row_of_a_queue_that_was_lost_without_a_broken_connection",
    ),
    Fault(
        "queues that were checked once are not checked again after a connection broke",
        "stores/postgres/queue_ids.py",
        "        self._checked.clear()\n",
        "        pass\n",
        f"{QUEUE_NUMBERS}::test_queues_are_checked_again_after_a_connection_broke",
    ),
    Fault(
        "an execution whose queue is missing from the file cannot be read",
        "stores/sqlite/queue_ids.py",
        "                return MISSING_QUEUE\n",
        "                raise LookupError(number)\n",
        f"{QUEUES}::test_an_execution_without_a_queue_can_be_read_explained_and_cancelled",
    ),
    Fault(
        "a missing queue is not restored",
        "engine/runtime/runtime.py",
        "for queue in await self.retry_while_unavailable(lambda: self.store.queues(lane_id)):",
        "for queue in list[str]():",
        f"{QUEUES}::test_the_reconciler_enqueues_an_execution_again",
    ),
    Fault(
        "the doctor does not name executions whose queue is missing",
        "cli/commands/maintenance.py",
        "    if not unlisted:\n",
        "    if True:\n",
        f"{QUEUES}::test_the_doctor_reports_executions_without_a_queue",
    ),
    Fault(
        "positions continue after the last one that survived a failover",
        "stores/postgres/event_log.sql",
        "else greatest(f.numbered, floor(extract(epoch from clock_timestamp()) * 1000)::bigint * 32)",
        "else f.numbered",
        f"{FAILOVER}::test_a_subscriber_to_lost_events_is_notified_of_a_gap_and_misses_nothing_that_follows",
    ),
    Fault(
        "positions of a restored file continue after the last one in it",
        "stores/sqlite/connection_thread.py",
        "                if self.must_advance_positions:\n",
        "                if False:\n",
        "tests/stores/sqlite/test_errors.py"
        "::test_a_cursor_beyond_the_end_of_a_restored_file_is_reported_and_misses_nothing",
    ),
    Fault(
        "a cursor that the feed cannot continue gets no gap",
        "stores/postgres/event_log.py",
        'diverged = diverged or not row["known"]',
        "diverged = False",
        "tests/stores/contract/test_feed.py::test_a_position_beyond_the_feed_is_reported_and_reading_continues_at_the_end",
    ),
    # Foreign responses, and connections.
    Fault(
        "a statement may take as long as a silent connection lasts",
        "stores/postgres/pool.py",
        "asyncio.timeout((self.deadlines.command_s if command_s is None else command_s) or None)",
        "asyncio.timeout(command_s)",
        "tests/chaos/test_black_holes.py::test_a_write_whose_deadline_has_passed_has_an_unknown_outcome_and_a_read_is_retried",
    ),
    Fault(
        "idle connections that went silent are tried one after the other",
        "stores/postgres/pool.py",
        "                self._close_idle()\n",
        "                pass\n",
        "tests/chaos/test_black_holes.py::test_idle_connections_of_the_same_age_are_not_tried_one_after_the_other",
    ),
    Fault(
        "a heartbeat waits for a silent connection for longer than the lease",
        "sdk/worker/worker.py",
        "connect=lambda: self._app.connect(hears=False, command_s=self._ttl_ms / 4000)",
        "connect=lambda: self._app.connect(hears=False)",
        "tests/chaos/test_black_holes.py::test_a_worker_whose_connections_go_silent_works_again_within_its_lease",
    ),
    Fault(
        "a worker gives a command more time than its lease has",
        "sdk/worker/worker.py",
        "                engine.limit_commands(self._ttl_ms * COMMAND_LEASE_SHARE / 1000)\n",
        "",
        "tests/engine/operations/test_deadlines.py::test_a_worker_limits_commands_to_less_than_its_lease",
    ),
    Fault(
        "a refusal of a proxy counts as one of the server",
        "client/transport.py",
        "                if refused is None:\n                    is_repeat, fault = True, proxy_error(status, body)\n",
        "                if refused is None and status < 500:\n                    raise errors.InvalidInput(str(status))\n                if refused is None:\n                    is_repeat, fault = True, proxy_error(status, body)\n",
        f"{FOREIGN}::test_a_completion_that_a_proxy_refuses_is_retried",
    ),
    Fault(
        "an authorization problem fails the attempt of a handler",
        "sdk/worker/outcome.py",
        "        case Unauthorized() | StoreUnavailable(source=StoreFault.AUTH):",
        "        case StoreUnavailable(source=StoreFault.AUTH):",
        f"{FOREIGN}::test_a_handler_that_is_not_authorized_is_delayed",
    ),
    Fault(
        "an outcome whose report failed is not sent again",
        "sdk/worker/outcome.py",
        "return not isinstance(refusal, StoreUnavailable | Unauthorized | ResourceExhausted | OperationTimeout)",
        "return True",
        f"{FOREIGN}::test_a_run_succeeds_although_a_proxy_refuses_its_completion_for_long",
    ),
    # Retention.
    Fault(
        "a flow stays when its last member is removed",
        "engine/retention/purger.py",
        "        return await self.purge_flow(flow_id)\n",
        "        return False\n",
        f"{PURGE}::test_a_flow_is_purged_with_its_last_member",
    ),
    Fault(
        "a flow whose last member went before a crash stays",
        "engine/sweeps/catalog.py",
        "lambda row: engine.purge_flow(row.flow_id), row=Flow)",
        "lambda row: engine.project_flow_summary(row.flow_id), row=Flow)",
        f"{PURGE}::test_a_flow_whose_last_member_was_purged_before_a_crash_is_purged_later",
    ),
    Fault(
        "the edges of a removed flow stay",
        "rules/retention.py",
        "    FlowMember,\n    Edge,\n    EdgeGroup,\n    FlowSummary,\n    PendingSiblingCancel,\n    PendingMemberCancel,\n    CancelBacklog,\n)\n\n\nclass",
        "    FlowMember,\n    EdgeGroup,\n    FlowSummary,\n    PendingSiblingCancel,\n    PendingMemberCancel,\n    CancelBacklog,\n)\n\n\nclass",
        f"{PURGE}::test_every_table_keyed_by_flow_is_purged_with_the_flow",
    ),
    Fault(
        "the process that sweeps first decides how long events are kept",
        "engine/sweeps/catalog.py",
        'keeps = "" if kept_ms == FEED_RETENTION_MS else str(kept_ms)',
        'keeps = ""',
        "tests/engine/sweeps/test_feed_retention.py::test_a_feed_is_trimmed_beside_a_server_that_keeps_events_longer",
    ),
    # Workers.
    Fault(
        "a worker treats its own park as a lost lease",
        "sdk/worker/worker.py",
        "        if _is_own_park(attempt.claimed, error):",
        "        if False:",
        f"{QUIET}::test_a_renewal_that_races_with_a_park_is_no_lost_lease",
    ),
    Fault(
        "a lost lease is a failed attempt",
        "sdk/worker/runner.py",
        "    if (lost := find_lease_loss(error, claimed.execution_id)) is not None:\n",
        "    if (lost := None) is not None:\n",
        f"{QUIET}::test_a_step_that_finds_its_lease_lost_is_no_failed_attempt",
    ),
    Fault(
        "a worker whose connection breaks while it starts gives up",
        "sdk/worker/worker.py",
        "                if not error.retryable:\n                    raise\n",
        "                raise\n",
        f"{QUIET}::test_a_worker_whose_connection_breaks_during_its_start_retries",
    ),
    Fault(
        "a worker that finds a newer schema goes on",
        "sdk/worker/worker.py",
        "            self._schema_error = error\n            self.stop()\n",
        "            self._schema_error = error\n",
        "tests/chaos/test_newer_schema.py::test_a_worker_reports_that_the_schema_is_newer_and_stops",
    ),
    Fault(
        "an interrupted demo ends with a traceback",
        "demo/__init__.py",
        "    except KeyboardInterrupt:\n",
        "    except ZeroDivisionError:\n",
        "tests/cli/test_demo.py::test_an_interrupted_demo_prints_that_it_stopped_and_leaves_no_files",
    ),
    Fault(
        "a worker of the previous release still writes after a migration",
        "stores/sqlite/connection_thread.py",
        "                self._check(db)\n                began",
        "                began",
        "tests/engine/operations/test_schema_versions.py::test_a_running_release_refuses_every_call_once_the_schema_is_incompatible",
    ),
    # Clocks.
    Fault(
        "the clock of a file is that of the process",
        "stores/sqlite/file_clock.py",
        "        offset, anchor = self._offset, self._anchor\n",
        "        return self._machine.wall()\n",
        f"{CLOCK}::test_processes_with_different_wall_clocks_read_the_same_time",
    ),
    Fault(
        "after a boot the clock of a file may be behind its newest row",
        "stores/sqlite/file_clock.py",
        "max(wall, _newest(db))",
        "wall",
        f"{CLOCK}::test_after_a_boot_time_is_never_before_the_latest_time_of_the_file",
    ),
    Fault(
        "a backup leaves out what is not yet in the file itself",
        "stores/sqlite/backup.py",
        '        with copy.backup("main", original, "main") as backup:\n            backup.step(-1)\n',
        '        __import__("shutil").copyfile(source, partial)\n',
        "tests/stores/sqlite/test_backup.py::test_copies_made_under_load_are_complete_and_consistent",
    ),
    # Flows, limits, claims, sweeps.
    Fault(
        "the event of a cancelled flow names nothing",
        "rules/flow/cancel.py",
        "        execution_id=flow.flow_id,  #",
        '        execution_id="",  #',
        "tests/scenarios/flow/test_cancel.py::test_the_event_of_a_cancelled_flow_has_the_flow_id_as_execution_id",
    ),
    Fault(
        "a replayed member whose join is impossible waits forever",
        "rules/flow/dependencies.py",
        "    if state is GroupState.IMPOSSIBLE:\n        return _skip_again(row, group)\n",
        "",
        "tests/scenarios/flow/test_replay.py::test_a_replayed_member_whose_quorum_exceeds_its_edges_is_skipped_again",
    ),
    Fault(
        "a grant is redeemed although its slot went to another execution",
        "engine/operations/claims.py",
        "if row is not None and grant_rules.holds_admitted_grant(row):\n",
        "if False:\n",
        "tests/scenarios/limits/test_slots.py::test_a_grant_whose_slot_went_to_another_execution_is_not_redeemed",
    ),
    Fault(
        "a partition that does not exist is empty",
        "engine/validation/execution.py",
        "least=0, most=counts.flow - 1)",
        "least=0, most=65_535)",
        "tests/scenarios/flow/test_reads.py::test_reads_of_a_partition_that_does_not_exist_are_refused",
    ),
    Fault(
        "a declaration overwrites limits that an operator set",
        "rules/limits/usage.py",
        "        if definition.declaration in (None, state.root.declaration):\n",
        "        if definition.declaration is None:\n",
        "tests/sdk/durable/limits/test_limits.py::test_a_limit_set_by_an_operator_stays_until_the_declaration_changes",
    ),
    Fault(
        "a limit that has capacity again unblocks by age alone",
        "engine/limits/unblocker.py",
        "            order = unblock_order.unblock_order(rows, turns, now, truncated=cut)\n",
        "            order = sorted(rows, key=lambda row: (row.rank, row.execution_id))\n",
        "tests/scenarios/limits/test_fairness_beside_limits.py::test_a_late_tenant_gets_every_second_slot",
    ),
    Fault(
        "a world ignores the settings of its app",
        "testing/world.py",
        "settings=_world_settings(self.app))",
        "settings=SETTINGS)",
        "tests/sdk/world/test_world_threads.py::test_a_world_has_the_settings_of_its_app",
    ),
    Fault(
        "a handler of a killed worker that swallows its cancellation goes on",
        "sdk/worker/worker.py",
        "                attempt.context.durable.close()\n",
        "                pass\n",
        "tests/sdk/world/test_world.py"
        "::test_a_handler_of_a_killed_worker_that_swallows_its_cancellation_does_nothing_more",
    ),
    Fault(
        "a world settles while plain code runs",
        "testing/world.py",
        "await self._time.wait_idle()",
        "await asyncio.sleep(0)",
        "tests/sdk/world/test_world_threads.py::test_settle_waits_for_blocking_steps",
    ),
    Fault(
        "every loop opens an engine",
        "sdk/engine_provider.py",
        "            return self._running_loop() or self._start_own_loop()\n",
        "            return self._running_loop() or self._start_own_loop() if anywhere else asyncio.get_running_loop()\n",
        "tests/sdk/test_connections.py::test_short_lived_loops_share_one_engine",
    ),
    Fault(
        "a join that cannot be read ends the pass of a sweep",
        "engine/sweeps/flows.py",
        "    unread = tuple(row for row in found if isinstance(row, UnreadableRow))\n",
        "    unread = tuple(row for row in found if isinstance(row, UnreadableRow))\n    for row in unread:\n        raise row.fault\n",
        "tests/engine/sweeps/test_unreadable_rows.py::test_the_reconciler_continues_past_an_unreadable_join",
    ),
    Fault(
        "of two handles of one execution the last one is completed first",
        "engine/operations/leases.py",
        "await asyncio.gather(*map(complete_in_order, singles.values()))\n",
        "await asyncio.gather(*(complete_in_order(indexes[::-1]) for indexes in singles.values()))\n",
        "tests/engine/operations/test_complete_many.py::test_handles_of_one_execution_are_answered_in_order",
    ),
    Fault(
        "an outcome with many edges is counted after its replay",
        "rules/flow/successors.py",
        "    writes += tuple(clear_outcome(edge.downstream_execution_id, edge.edge_id) for edge in edges)\n",
        "",
        "tests/engine/operations/test_replay_many_edges.py::test_no_outcome_of_a_former_life_is_counted_once_the_upstream_is_replayed",
    ),
    Fault(
        "executions of a late claim are not released before their lease expires",
        "engine/claiming/fast_claims.py",
        "                self.late_claims.watch(pending, claimed)\n",
        "                pass\n",
        "tests/engine/claiming/test_late_claims.py::test_an_execution_claimed_by_a_late_request_is_claimable_again_soon",
    ),
    Fault(
        "a dead holder of a sweep is noticed after three intervals",
        "engine/sweeps/sweeper.py",
        "if held_ms := await self._hold(sweep, interval_ms):",
        "if held_ms := await self._hold(sweep, 3 * interval_ms):",
        "tests/engine/sweeps/test_sweeper.py::test_a_dead_holder_is_replaced_within_one_interval",
    ),
    Fault(
        "the sweep delivers the ends of a parent's children one by one",
        "engine/sweeps/catalog.py",
        "engine.child_completions.deliver_soon(",
        "engine.child_completions.deliver(",
        "tests/scenarios/durable/test_children.py::test_the_sweep_delivers_the_completions_of_a_parent_together",
    ),
    # Votes and messages.
    Fault(
        "JSON that is posted to an approval's link is read as a form",
        "server/routes/approval_pages.py",
        "await _answer_form(request) if token is None else await _answer_json(request, token)",
        "await _answer_form(request)",
        "tests/server/routes/test_approval_json.py::test_a_vote_posted_as_json_gets_a_json_response",
    ),
    Fault(
        "an error message contains internal facts",
        "errors/base.py",
        "for name in _SHOWN if self.facts.get(name) is not None)",
        "for name in self.facts if self.facts.get(name) is not None)",
        "tests/model/test_errors.py::test_no_message_carries_an_internal_field",
    ),
    Fault(
        "an approval's link contains raw braces",
        "sdk/approvals.py",
        "quote(run_id, safe=':')",
        "run_id",
        "tests/server/routes/test_approval_json.py::test_a_link_contains_only_url_characters",
    ),
)
