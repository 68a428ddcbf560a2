"""Faults in the client of the Valkey store: a lost reply that is taken for a refusal, a write that is sent twice."""

from __future__ import annotations

from tests.faults.fault import Fault

CONNECTION = "tests/stores/valkey/client/test_connection.py"
REDIRECTS = "tests/stores/valkey/client/test_redirects.py"
CHECKS = "tests/stores/valkey/test_server_checks.py"

VALKEY_CLIENT = (
    Fault(
        "valkey: a write whose reply was lost is sent again",
        "stores/valkey/cluster.py",
        "is_safe = command.is_read or not sent",
        "is_safe = True",
        f"{CONNECTION}::test_a_write_without_a_whole_reply_is_in_doubt_and_never_sent_twice",
    ),
    Fault(
        "valkey: a reply does not wait for its confirmation",
        "stores/valkey/session.py",
        "elif self._confirmations:",
        "elif not command:",
        f"{CONNECTION}::test_replies_are_held_until_enough_replicas_have_the_batch",
    ),
    Fault(
        "valkey: a short WAIT is enough",
        "stores/valkey/cluster.py",
        "is_enough=lambda copies: copies >= wait",
        "is_enough=lambda copies: copies >= 0",
        f"{CONNECTION}::test_a_batch_with_too_few_copies_is_in_doubt_though_the_server_executed_it",
    ),
    Fault(
        "valkey: a read after doubt does not wait for a confirmed write",
        "stores/valkey/cluster.py",
        "if self._unconfirmed and slot in self._unconfirmed:",
        "if False:",
        f"{CONNECTION}::test_a_read_after_a_write_in_doubt_waits_for_a_confirmed_write_to_its_slot",
    ),
    Fault(
        "valkey: an error from inside a function is taken for a refusal",
        "stores/valkey/errors.py",
        "return any(place in error.text for place in _INSIDE_FUNCTION)",
        "return False",
        f"{CONNECTION}::test_an_error_from_within_a_function_is_corruption_and_is_not_repeated",
    ),
    Fault(
        "valkey: a silent connection is never closed",
        "stores/valkey/session.py",
        "if limit_s and waited_s >= limit_s:",
        "if False:",
        "tests/stores/valkey/test_server_faults.py::test_a_black_hole_is_noticed_within_the_timeout_and_left",
    ),
    Fault(
        "valkey: commands that wait for a connection are unbounded",
        "stores/valkey/connection.py",
        "self._waiting_bytes + size > MAX_WAITING_BYTES",
        "size < 0",
        f"{CONNECTION}::test_commands_that_wait_for_a_connection_are_bounded_in_bytes",
    ),
    Fault(
        "valkey: commands that wait for the slot map are unbounded",
        "stores/valkey/cluster.py",
        "if self._stalled and self._stalled_bytes + size > MAX_WAITING_BYTES:",
        "if False:",
        f"{REDIRECTS}::test_calls_that_wait_for_the_slot_map_are_bounded_in_bytes",
    ),
    Fault(
        "valkey: an ASK is followed without ASKING",
        "stores/valkey/cluster.py",
        "            command.asking = True\n",
        "            command.asking = False\n",
        f"{REDIRECTS}::test_an_ask_is_followed_once_with_asking_in_front_and_not_remembered",
    ),
    Fault(
        "valkey: a moved slot is not remembered",
        "stores/valkey/cluster.py",
        "            self._slots[slot] = target\n",
        "",
        f"{REDIRECTS}::test_a_moved_slot_is_followed_and_remembered",
    ),
    Fault(
        "valkey: redirects are followed for ever without a pause",
        "stores/valkey/cluster.py",
        "if command.redirects > MAX_REDIRECTS:",
        "if command.redirects < 0:",
        f"{REDIRECTS}::test_two_nodes_that_redirect_to_each_other_fail_the_call_at_its_deadline_not_in_doubt",
    ),
    Fault(
        "valkey: a slow node that lost its slots is waited for",
        "stores/valkey/cluster.py",
        "            if node.is_slow:\n",
        "            if False:\n",
        f"{REDIRECTS}::test_a_slow_node_that_has_lost_its_slots_is_left_before_the_timeout",
    ),
    Fault(
        "valkey: a subscription that reconnects does not report it",
        "stores/valkey/subscription.py",
        "            if self._was_ready:\n",
        "            if False:\n",
        f"{REDIRECTS}::test_a_subscription_reconnects_and_reports_it_once_it_hears_again",
    ),
    Fault(
        "valkey: an eviction policy is accepted",
        "stores/valkey/server_checks.py",
        'if server.maxmemory_policy != "noeviction":',
        "if False:",
        f"{CHECKS}::test_an_eviction_policy_is_refused_with_the_fix",
    ),
    Fault(
        "valkey: the time of a round trip counts as a difference of clocks",
        "stores/valkey/server_checks.py",
        "earliest = min((server.clock_ms[1] for",
        "earliest = min((server.clock_ms[0] for",
        f"{CHECKS}::test_a_slow_reply_is_no_difference_of_clocks",
    ),
)
