"""One execution as the specification defines it, written without reference to the rules.

Every field is a plain value that an operation sets, in the terms of execution.md. Only the public state is derived.
"""

from __future__ import annotations

from typing import Any

SYSTEM = ("operator_override", "flow_cascade", "system_timeout")
DAY = 24 * 60 * 60 * 1000


class Refused(Exception):
    """A refusal of the specification with its kind and facts."""

    def __init__(self, kind: str, **facts: Any) -> None:
        super().__init__(kind)
        self.words = {"refused": kind, **facts}


class Life:
    """An execution with its attempts, leases and events."""

    def __init__(self, execution_id: str, now: int, asked: dict[str, Any]) -> None:
        self.execution_id = execution_id
        self.partition = int(execution_id[4 : execution_id.index("}")])
        self.lane = asked.get("lane_id", "default")
        self.namespace = asked.get("namespace", "default")
        self.priority = min(9000, max(0, asked.get("priority", 0)))
        self.policy: dict[str, Any] = asked.get("policy") or {}
        self.payload = asked.get("input_payload") or None
        self.tags = dict(asked.get("tags") or {})
        self.created = self.transition = self.mutation = now
        self.phase, self.owner, self.outcome = "runnable", "unowned", "none"
        self.attempt_state = "pending_first_attempt"
        self.eligibility, self.reason, self.detail = "eligible_now", "waiting_for_worker", ""
        self.attempts: list[dict[str, Any]] = []
        self.history: list[tuple[Any, ...]] = []  # event, time, epoch, reason, and by whom a lease was ended
        self.result: bytes | None = None
        self.epoch = self.retries = self.replays = self.reclaims = 0
        self.lease: dict[str, Any] | None = None  # while it is leased, and after it expired or was revoked
        self.attempt_id: str | None = None
        self.current_lane = self.lane
        self.pending: dict[str, Any] = {}
        self.grant: dict[str, Any] | None = None
        self.timeout_at: int | None = None  # armed for the running attempt
        self.armed_for: int | None = None  # its duration
        self.time_left: int | None = None  # kept while an attempt is interrupted
        self.facts: dict[str, Any] = {}  # started_at, completed_at, failure_reason, progress and the like, once set
        timeouts = self.policy.get("timeout_policy", {})
        lives_for = timeouts.get("execution_deadline_ms")
        self.deadline = asked.get("execution_deadline_at") or (now + lives_for if lives_for else None)
        self.delay: int | None = None
        delay = asked.get("delay_until")
        delay = self.policy.get("delay_until") if delay is None else delay
        if delay is not None and delay > now:
            self.delay = delay
            self.eligibility, self.reason = "not_eligible_until_time", "waiting_for_delay"
            self.detail = f"delayed until {delay}"

    # -- queries ----------------------------------------------------------------------------------------------------

    @property
    def public(self) -> str:
        if self.phase == "terminal":
            return {"success": "completed"}.get(self.outcome, self.outcome)
        if self.phase == "active":
            return "active"
        return {
            "not_eligible_until_time": "delayed",
            "blocked_by_dependencies": "waiting_children",
            "blocked_by_budget": "rate_limited",
            "blocked_by_quota": "rate_limited",
        }.get(self.eligibility, "waiting")

    @property
    def required(self) -> set[str]:
        return set(self.policy.get("routing_requirements", {}).get("required_capabilities", ()))

    @property
    def position(self) -> tuple[int, str]:
        """Return its position in the order of claims: priority, then age, then id."""
        return self.created - self.priority * (self.policy.get("ageing") or 10**12), self.execution_id

    @property
    def attempt(self) -> dict[str, Any] | None:
        """Return the attempt that has not finished."""
        last = self.attempts[-1] if self.attempts else None
        return last if last and last["state"] in ("started", "suspended") else None

    def is_granted(self, now: int) -> bool:
        return self.grant is not None and now < self.grant["expires"]

    def has_lapsed(self, now: int) -> bool:
        """Return True if its lease has expired and was not marked yet."""
        return self.owner == "leased" and self.lease is not None and self.lease["expires"] <= now

    def is_interrupted(self) -> bool:
        return self.owner in ("lease_expired_reclaimable", "lease_revoked")

    def not_active(self) -> Refused:
        return Refused(
            "execution_not_active",
            terminal_outcome=self.outcome,
            lease_epoch=self.epoch,
            lifecycle_phase=self.phase,
            attempt_id=self.attempt_id or "",
        )

    def core(self) -> dict[str, Any]:
        """Return the core record, without unset fields."""
        owned = self.lease if self.owner != "unowned" else None
        lasts = owned and self.owner != "lease_revoked"
        fields = {
            "namespace": self.namespace,
            "lane_id": self.lane,
            "partition_id": self.partition,
            "priority": self.priority,
            "lifecycle_phase": self.phase,
            "ownership_state": self.owner,
            "eligibility_state": self.eligibility,
            "blocking_reason": self.reason,
            "terminal_outcome": self.outcome,
            "attempt_state": self.attempt_state,
            "public_state": self.public,
            "blocking_detail": self.detail or None,
            "total_attempt_count": len(self.attempts),
            "retry_count": self.retries,
            "replay_count": self.replays,
            "lease_reclaim_count": self.reclaims,
            "current_attempt_index": len(self.attempts) - 1 if self.attempts else None,
            "current_attempt_id": self.attempt_id,
            "current_lease_id": owned and owned["id"],
            "current_lease_epoch": self.epoch,
            "current_worker_id": owned and owned["worker"],
            "current_worker_instance_id": owned and owned["instance"],
            "current_lane": self.current_lane,
            "created_at": self.created,
            "last_transition_at": self.transition,
            "last_mutation_at": self.mutation,
            "lease_expires_at": owned["expires"] if owned and lasts else None,
            "lease_last_renewed_at": owned and owned["renewed"],
            "lease_renewal_deadline": owned["renewed"] + owned["ttl"] * 2 // 3 if owned and lasts else None,
            "lease_expired_at": owned and owned.get("expired_at"),
            "lease_revoked_at": owned and owned.get("revoked_at"),
            "lease_revoke_reason": owned and owned.get("revoke_reason"),
            "delay_until": self.delay,
            "execution_deadline_at": self.deadline,
            "attempt_timeout_at": self.timeout_at,
            "required_capabilities": ",".join(sorted(self.required)) or None,
            **self.pending,
            **self.facts,
        }
        return {name: value for name, value in fields.items() if value is not None}

    # -- transitions ------------------------------------------------------------------------------------------------

    def vector(self, now: int, **dimensions: str) -> None:
        """Change the state vector."""
        for name, value in dimensions.items():
            setattr(self, name, value)
        self.transition = self.mutation = now

    def enter(self, now: int) -> None:
        """Become claimable."""
        self.delay, self.detail = None, ""
        self.vector(now, phase="runnable", eligibility="eligible_now", reason="waiting_for_worker")

    def acquire(self, now: int, holder: dict[str, Any], ids: dict[str, Any], event: str, why: str | None) -> None:
        """Acquire the lease: increment the epoch, clear markers and grant."""
        self.epoch += 1
        self.grant = None
        self.current_lane = holder["lane"] or self.lane
        self.lease = {
            "id": ids["lease_id"],
            "worker": holder["worker"],
            "instance": holder["instance"],
            "ttl": holder["ttl"],
            "renewed": now,
            "expires": now + holder["ttl"],
        }
        self.facts.setdefault("started_at", now)
        self.delay, self.detail = None, ""
        self.vector(
            now,
            phase="active",
            owner="leased",
            eligibility="not_applicable",
            reason="none",
            attempt_state="running_attempt",
        )
        self.history.append((event, now, self.epoch, why, None))

    def begin(self, now: int, holder: dict[str, Any], ids: dict[str, Any], kind: str, timeout: int | None) -> None:
        """Start a new attempt under the lease just acquired."""
        lineage: dict[str, Any] = {}
        last = len(self.attempts) - 1 if self.attempts else None
        if kind == "retry":
            lineage |= {"previous_attempt_index": last, "retry_reason": self.pending.get("pending_retry_reason")}
        if kind == "replay":
            lineage |= {"replayed_from_attempt_index": last}
        self.attempt_id = ids["attempt_id"]
        self.attempts.append(
            {
                "attempt_index": len(self.attempts),
                "attempt_id": self.attempt_id,
                "attempt_type": kind,
                "state": "started",
                "started_at": now,
                "lineage": lineage,
            }
        )
        self.pending = {}
        self._bear(now, timeout)

    def resume(self, now: int, timeout: int | None) -> None:
        """Resume the interrupted attempt under the lease just acquired."""
        attempt = self.attempts[-1]
        attempt.update(state="started", resumed_at=now, suspended_at=None, suspension_id=None)
        self._bear(now, self.time_left if timeout is None else timeout)

    def _bear(self, now: int, timeout: int | None) -> None:
        assert self.lease is not None
        self.attempts[-1].update(
            lease_id=self.lease["id"],
            lease_epoch=self.epoch,
            worker_id=self.lease["worker"],
            worker_instance_id=self.lease["instance"],
        )
        self.timeout_at = now + timeout if timeout else None
        self.armed_for = timeout or None
        self.time_left = None

    def whole_timeout(self) -> int | None:
        """Return the initial timeout of the attempt; of a resumed one, that of its policy or the remaining time."""
        was_resumed = "resumed_at" in self.attempts[-1]
        if self.armed_for is None or (was_resumed and self.own_timeout() is not None):
            return self.own_timeout()
        return self.armed_for

    def own_timeout(self) -> int | None:
        own: int | None = self.policy.get("timeout_policy", {}).get("attempt_timeout_ms")
        return own

    def end_attempt(self, now: int, state: str, reason: str | None = None, category: str | None = None) -> None:
        if self.attempt is not None:
            self.attempt.update(ended_at=now, failure_reason=reason, failure_category=category, state=state)

    def release(self, now: int, why: str, by: str = "backend") -> None:
        """Release the lease in any state."""
        self.history.append(("released", now, self.epoch, why, by))
        self.lease, self.owner = None, "unowned"
        self.timeout_at = None

    def mark_expired(self, now: int) -> None:
        assert self.lease is not None
        self.lease["expired_at"] = now
        self.owner, self.reason, self.attempt_state = (
            "lease_expired_reclaimable",
            "waiting_for_worker",
            "attempt_interrupted",
        )
        self.detail = "lease expired, awaiting reclaim"
        self.mutation = now
        self.history.append(("expired", now, self.epoch, None, None))

    def park(self, now: int, suspension: str) -> None:
        """Interrupt the attempt and keep its remaining time."""
        self.time_left = None if self.timeout_at is None else max(1, self.timeout_at - now)
        assert self.attempt is not None
        self.attempt.update(state="suspended", suspended_at=now, suspension_id=suspension)
        self.release(now, suspension)
        self.attempt_state = "attempt_interrupted"

    def end(
        self,
        now: int,
        outcome: str,
        attempt: str,
        *,
        why: str,
        by: str = "backend",
        reason: str | None = None,
        category: str | None = None,
    ) -> None:
        """Become terminal from any state."""
        self.end_attempt(now, attempt, reason, category)
        if self.phase == "active":
            self.release(now, why, by)
        if self.attempts:
            self.attempt_state = "attempt_terminal"
        self.grant = self.deadline = self.delay = self.timeout_at = self.time_left = None
        self.pending, self.detail = {}, ""
        self.facts["completed_at"] = now
        self.vector(now, phase="terminal", eligibility="not_applicable", reason="none", outcome=outcome)

    def kept_until(self) -> int:
        kept: int = self.policy.get("stream_policy", {}).get("retention_ttl_ms", DAY)
        completed: int = self.facts["completed_at"]
        return completed + kept
