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
        *("load", "scan", "patiently", "settle", "settle_execution", "opened", "who", "note", "note_all"),
        *(
            "note_alike",
            "note_lease",
            "note_line",
            "knows_lane",
            "hear_of_lane",
            "note_taken",
            "may_set_free",
            "remember",
            "tell",
            "follow",
            "follow_children",
            "follow_messages",
        ),
        # claims: what a checked order goes through
        *("pull", "claim_now", "look_around", "has_looked", "mark_lapsed_leases", "lines_of", "sees_whole", "covered"),
        *("heads", "forget_decided", "turns_of", "keep_turns", "next_turn", "admit", "give_back", "close_route"),
        *("unblock_turns", "keep_unblock_turns", "note_blocked", "note_lists", "rivals"),
        *("look_after", "pass_over", "wish", "granted", "forgo", "portions", "windows", "contenders"),
        # signing keys
        *("signing_key", "signer", "recent_keys", "keys_in", "opened_keys", "handle_keys"),
        # what sweeps, relays and wakes do to one row
        *("sweeper", "restore_queue", "sweep_worker", "expire_pending_waitpoint", "lapse_reservations"),
        *("reset_budget_if_due", "reconcile_quota_policy", "deliver", "redeliver", "take_in_children", "set_free"),
        *("hold_up", "let_go", "wake_budget", "wake_quota", "wake_quota_later", "wake_sleepers", "workers_of"),
        "sleep_for_budget",
        # what closing waits for
        *("dispatched", "delivered", "folds_done", "frames_written", "finish_background", "stop_timers"),
        # between the engine and the library above it
        *("nudge", "read_votes", "read_token_of", "is_token_of", "remembered_steps", "reserved_for", "read_levels"),
        *("holder_of", "ensure_partitions", "shutdown_prepare", "cancel_as_holder", "require_lease"),
        *("executions_without_queue", "snapshot_holders"),
    }
)


def operations(engine: type) -> tuple[str, ...]:
    """The names of an engine's operations, sorted."""
    names = (name for name in dir(engine) if not name.startswith("_") and name not in INTERNAL)
    return tuple(sorted(name for name in names if inspect.isfunction(getattr(engine, name))))
