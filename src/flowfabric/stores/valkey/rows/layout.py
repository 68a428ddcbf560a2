"""The storage layout: the place of each column in a row's blob. Places are only ever appended, never moved or reused.

A row that another release wrote may be shorter or longer than this layout. Readers take a missing column as unset (or
as its default, if it cannot be unset), and writers carry cells beyond the layout through unchanged. So columns can be
added while two releases write the same rows.

Key columns are not in the blob, because they are in the key text; one that begins an index is in both. A bytes column
has a place that says whether it is set; its content follows the cells (`codec.py`). A table has at most one of them.
"""

from __future__ import annotations

_LAYOUT = {
    "ff_exec_core": """
        revision partition namespace lane_id priority created_at last_transition_at last_mutation_at lifecycle_phase
        ownership_state eligibility_state blocking_reason terminal_outcome attempt_state public_state
        total_attempt_count retry_count replay_count lease_reclaim_count lease_epoch rank has_waits has_steps
        started_at attempt_index attempt_id attempt_type attempt_started_at lease_id worker_id worker_instance_id
        current_lane lease_acquired_at lease_renewed_at completed_at purge_at tags flow_id next_type line
        lease_expires_at attempt_timeout_at deadline_at next_timeout_ms terms successors parent_id
        required_capabilities blocking_text attempt_suspended_at attempt_suspension attempt_resumed_at lineage
        lease_expired_at lease_revoked_at lease_revoke_reason delay_until granted_until grant failure_reason
        cancellation_reason cancelled_by last_capability_mismatch_at progress_pct progress_message
        progress_updated_at current_suspension_id current_waitpoint_id last_hmac_validation_failed_at stream_index
        blocked_on blocked_at progress_counts has_mail idempotency_key life past_life
    """,
    "ff_payload": "execution_kind creator_identity input_payload payload_encoding policy",
    "ff_result": "payload encoding",
    "ff_attempt": """
        attempt_id attempt_type attempt_state started_at lease_id lease_epoch worker_id worker_instance_id lineage
        suspended_at suspension_id resumed_at ended_at failure_reason failure_category failure
    """,
    "ff_idempotency": "revision execution_id expires_at until first_at",
    "ff_sweep": "revision holder lease_until",
    "ff_partition_config": "revision num_flow_partitions num_budget_partitions num_quota_partitions",
    "ff_api_token": """
        revision name scopes digest created_at namespaces previous_digest previous_until expires_at revoked_at parent
    """,
    "ff_keystore": "revision current_kid",
    "ff_waitpoint_hmac": "secret_hex current expires_at",
    "ff_suspension": """
        revision partition signal_count suspension_id attempt_index waitpoints reason_code requested_by
        continuation_metadata_pointer created_at timeout_at timeout_behavior due_at resume_condition resume_policy
        last_signal_at satisfied_at closed_at close_reason closer_signal_id progress satisfiers waits_on gates mail
        asks_until message_count inbox_closed_at
    """,
    "ff_waitpoint": """
        execution_id attempt_index waitpoint_key created_at token_kid token_fingerprint signal_count
        matched_signal_count log_start suspension_id gate activated_at expires_at pending_until closed_at
        close_reason last_signal_at
    """,
    "ff_signal": """
        signal_id signal_name signal_category source_type source_identity target_scope created_at accepted_at
        observed_effect correlation_id idempotency_key payload_encoding payload
    """,
    "ff_remembered": "expires_at answer",
    "ff_gate": """
        kind ended_as opened_at closed_at votes payload payload_encoding sender message_id mailbox number results
        message_number wants_reply
    """,
    "ff_mail": "message_id sent_at sender payload payload_encoding number wants_reply",
    "ff_reply": "mailbox state asked_at replied_at payload payload_encoding reason",
    "ff_child_end": "outcome due_at result result_encoding",
    "ff_child_cancel": "revision due_at",
    "ff_schedule": """
        revision namespace name spec template digest created_at updated_at decided_until input_payload owner next_at
        next_instant paused_at paused_by note active pending last_run_id last_instant fired skipped missed
    """,
    "ff_step": "attempt_index recorded_at result encoding digest number started_at",
    "ff_fact": "revision number set_at value encoding",
    "ff_stream": """
        revision created_at last_ms last_seq frame_count total_bytes last_frame_at kept_from pages has_durable_frame
        vanishes_at ema_rate_hz last_append_ts_ms maxlen_applied_last closed_at closed_reason
    """,
    "ff_frame": "number ts mode frame_type payload correlation_id summary_version ttl_ms",
    "ff_stream_summary": "document version first_applied_ms last_updated_ms patch_kind",
    "ff_flow_core": """
        revision partition flow_kind namespace public_flow_state created_at last_mutation_at graph_revision
        node_count edge_count tags cancelled_at cancel_reason cancellation_policy project_at purge_check_at
    """,
    "ff_flow_member": "",
    "ff_edge": """
        upstream_execution_id downstream_execution_id dependency_kind created_at data_passing_ref
    """,
    "ff_edge_group": """
        revision policy_variant k staged n succeeded failed skipped group_state cancel_siblings_pending_flag
        on_satisfied satisfied_at waiting_since cancel_siblings_pending_members cancel_siblings_reason
        last_flow_graph_revision
    """,
    "ff_dependency": """
        revision flow_id upstream_execution_id dependency_kind state data_passing_ref outcome last_resolved_at
        unfolded_at
    """,
    "ff_dispatch": "revision flow_id outcome due_at after_edge",
    "ff_pending_cancel_groups": "revision flagged_at",
    "ff_cancel_backlog": "revision due_at remaining",
    "ff_cancel_backlog_member": "",
    "ff_flow_summary": """
        public_flow_state last_summary_update_at total_members sampled_members members_completed members_failed
        members_cancelled members_expired members_skipped members_active members_suspended members_waiting
        members_delayed members_rate_limited members_waiting_children
    """,
    "ff_outbox": "revision kind target body due_at attempts",
    "ff_budget_policy": """
        revision partition defined scope_type scope_id enforcement_mode on_hard_limit on_soft_limit
        reset_interval_ms breach_count soft_breach_count reset_count last_updated_at created_at last_breach_at
        last_breach_dim last_reset_at next_reset_at breached_at lapse_at declaration
    """,
    "ff_budget_usage": "hard_limit soft_limit reserved usage position",
    "ff_budget_usage_by_exec": "amount execution_id",
    "ff_budget_reservation": "execution_id amount expires_at epoch",
    "ff_budget_usage_dedup": "expires_at",
    "ff_quota_policy": """
        revision partition defined requests_per_window_seconds max_requests_per_window active_concurrency_cap
        jitter_ms active created_at
    """,
    "ff_quota_admitted": "life admission counted expires_at",
    "ff_quota_window": "admitted_at expires_at",
    "ff_worker_registry": """
        revision partition worker_id lanes capabilities liveness_ttl_ms registered_at_ms last_heartbeat_ms lapses_at
        tasks
    """,
    "ff_worker_registry_event": "expires_at reason",
    "ff_bulk_operation": """
        revision verb criteria ceiling state created_at reason requested_by changed refused due_at priority
        after_created_at after_execution_id page last_refusal ended_at
    """,
    "ff_lane": "revision spread previous effective_at former",
}

# Booleans whose False is stored as unset, so that it costs nothing at the end of a row.
UNSET_IF_FALSE = {"ff_exec_core": ("has_mail",), "ff_gate": ("wants_reply",), "ff_mail": ("wants_reply",)}

LAYOUT: dict[str, tuple[str, ...]] = {table: tuple(columns.split()) for table, columns in _LAYOUT.items()}
