"""Which of the engine's methods are its operations, and which its own pages call among themselves.

An operation looks at whatever it is handed and refuses what is wrong with a typed error. What stands here takes rows,
orders and changes that were looked at before, and may change with every release; nobody outside of the engine calls it.
"""

from __future__ import annotations

import inspect
from typing import Final

INTERNAL: Final = frozenset(
    {
        "limit_commands",
        # looking, deciding, writing, noting
        *(
            "load",
            "scan",
            "retry_while_unavailable",
            "decide_and_commit",
            "decide_execution",
            "handle_fields",
            "execution_and_fence",
            "publish_commit",
            "publish_commits",
        ),
        *(
            "publish_completions",
            "track_lease_expiry",
            "add_queue",
            "knows_lane",
            "load_lane_queues",
            "wake_sweeps_for",
            "may_unblock_others",
            "cache_leased_row",
            "notify",
            "on_write",
            "deliver_written_child_completions",
            "deliver_written_messages",
        ),
        # claims: what a checked order goes through
        *(
            "poll_lane",
            "claim_available",
            "refresh_lane",
            "is_lane_fresh",
            "mark_expired_leases",
            "lane_queues",
            "fits_one_round_trip",
            "covered_queues",
        ),
        *(
            "queue_heads",
            "forget_guarded",
            "turns_of",
            "keep_turns",
            "unblock_turns",
            "rivals",
            "keep_unblock_turns",
            "note_blocked",
            "note_lists",
            "next_lane_index",
            "admit",
            "release_slots",
            "block_if_unserved",
        ),
        *(
            "clean_up_lost_race",
            "skip_unreadable",
            "register_pending_claim",
            "collect_pending_claim",
            "abandon_pending_claim",
            "batch_queues",
            "rotating_windows",
            "claim_candidates",
        ),
        # signing keys
        *("require_signing_key", "find_signing_key", "cached_keys", "unseal_loaded_keys", "unseal_keys", "handle_keys"),
        # what sweeps, relays and wakes do to one row
        *("sweeper", "restore_queue", "remove_expired_worker", "expire_pending_waitpoint", "expire_reservations"),
        *(
            "reset_budget_if_due",
            "reconcile_quota_policy",
            "deliver_outbox_message",
            "redeliver_outbox_message",
            "deliver_child_completions",
            "unblock_rows",
        ),
        *(
            "block_row",
            "unblock_row",
            "unblock_budget_waiters",
            "unblock_quota_waiters",
            "schedule_quota_unblock",
            "resume_budget_suspended",
            "list_live_workers",
        ),
        "suspend_for_budget",
        # what closing waits for
        *(
            "wait_for_dispatch",
            "wait_for_deliveries",
            "wait_for_child_completions",
            "flush_frames",
            "finish_background_cancels",
            "cancel_window_timers",
        ),
        # between the engine and the library above it
        *(
            "wake_claims",
            "read_votes",
            "read_token_of",
            "is_token_of",
            "read_steps_as_holder",
            "reservation_owner",
            "refresh_gauges",
        ),
        *("authenticate_token", "ensure_partitions", "shutdown_prepare", "cancel_as_holder", "require_lease"),
        *("executions_without_queue", "snapshot_holders"),
    }
)


def operations(engine: type) -> tuple[str, ...]:
    """The names of an engine's operations, sorted."""
    names = (name for name in dir(engine) if not name.startswith("_") and name not in INTERNAL)
    return tuple(sorted(name for name in names if inspect.isfunction(getattr(engine, name))))
