"""The oracle: what every operation answers and does, written naively from execution.md.

It knows nothing of rules, rows, guards or queues; executions are objects in a dictionary. It receives two facts that
the specification leaves open: the minted identifiers, and whether a claim that had other work also scanned for expired
leases.
This page holds the second half: operations on leased executions, of operators and of time.
"""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import ANY

from tests.stateful.execution_model import SYSTEM, Life, Refused
from tests.stateful.oracle_claims import Claiming
from tests.stateful.players import Call

Triple = tuple[str | None, int | None, str | None]


class Oracle(Claiming):
    """All executions, and every operation."""

    def answer(self, call: Call, seen: Any, marked: set[str]) -> Any:
        """Return the plain answer of a call; `seen` provides minted ids, `marked` the expired leases it found."""
        self._seen, self._marked = seen, marked
        held = call.given.get("handle")
        try:
            if held is not None and held.foreign:
                raise Refused("handle_from_other_backend")
            return getattr(self, call.verb)(**call.given)
        except Refused as refused:
            return refused.words

    # -- 4.0 ----------------------------------------------------------------------------------------------------------

    def _held(self, given: dict[str, Any]) -> tuple[Life, Triple]:
        """Return the execution and the presented fence."""
        if "handle" in given:
            fields = given["handle"].fields
            return self.life(fields.execution_id), (fields.lease_id, fields.lease_epoch, fields.attempt_id)
        fence = given["fence"]
        return self.life(given["execution_id"]), (fence.lease_id, fence.lease_epoch, fence.attempt_id)

    def _resolve(self, life: Life, triple: Triple, source: str | None) -> Triple:
        if None not in triple:
            return triple
        if any(part is not None for part in triple):
            raise Refused("invalid_input", detail="partial_fence_triple")
        if source != "operator_override":
            raise Refused("invalid_input", detail="fence_required")
        return life.lease["id"] if life.lease else None, life.epoch, life.attempt_id

    def _check_lease(self, life: Life, triple: Triple) -> None:
        if life.phase != "active":
            raise life.not_active()
        if life.owner == "lease_revoked":
            raise Refused("lease_revoked")
        if life.has_lapsed(self.now):
            life.mark_expired(self.now)
        if life.owner == "lease_expired_reclaimable":
            raise Refused("lease_expired")
        assert life.lease is not None
        if triple != (life.lease["id"], life.epoch, life.attempt_id):
            raise Refused("stale_lease")

    # -- 4.9 to 4.14 --------------------------------------------------------------------------------------------------

    def renew(self, **given: Any) -> Any:
        life, triple = self._held(given)
        if "handle" in given:
            index = given["handle"].fields.attempt_index
            ttl = given.get("lease_ttl_ms") or given["handle"].fields.lease_ttl_ms
        else:
            index, ttl = given["attempt_index"], given["lease_ttl_ms"]
            triple = self._resolve(life, triple, None)
        is_live = life.owner == "leased" and not life.has_lapsed(self.now)
        if is_live and index != len(life.attempts) - 1:
            raise Refused("stale_lease")
        self._check_lease(life, triple)
        assert life.lease is not None
        life.lease.update(expires=self.now + ttl, renewed=self.now, ttl=ttl)
        life.mutation = self.now
        life.history.append(("renewed", self.now, life.epoch, None, None))
        return {"is": "Renewed", "expires_at": self.now + ttl, "lease_epoch": life.epoch}

    def renew_many(self, handles: list[Any], lease_ttl_ms: int) -> Any:
        said = []
        for handle in handles:
            try:
                said.append(self.renew(handle=handle, lease_ttl_ms=lease_ttl_ms))
            except Refused as refused:
                said.append(refused.words)
        return said

    def progress(self, handle: Any, **note: Any) -> Any:
        return self._note({"handle": handle}, **note)

    def update_progress(self, execution_id: str, fence: Any, **note: Any) -> Any:
        return self._note({"execution_id": execution_id, "fence": fence}, **note)

    def _note(self, given: dict[str, Any], pct: int | None = None, message: str | None = None) -> Any:
        if pct is not None and pct > 100:
            raise Refused("invalid_input")
        life, triple = self._held(given)
        if life.phase != "active":
            raise life.not_active()
        if life.owner == "lease_revoked":
            raise Refused("lease_revoked")
        if life.has_lapsed(self.now) or life.owner != "leased":
            raise Refused("lease_expired")
        assert life.lease is not None
        if triple[:2] != (life.lease["id"], life.epoch):
            raise Refused("stale_lease")
        life.facts["progress_updated_at"] = life.mutation = self.now
        if pct is not None:
            life.facts["progress_pct"] = pct
        if message is not None:
            life.facts["progress_message"] = message
        return {"is": "ProgressNoted", "execution_id": life.execution_id}

    def complete(self, result: bytes | None = None, source: str | None = None, **given: Any) -> Any:
        life, triple = self._held(given)
        said = {"is": "Completed", "execution_id": life.execution_id, "public_state": "completed"}
        held = self._resolve(life, triple, source)
        if self._was_mine(life, triple, "success"):
            return said
        self._check_lease(life, held)
        self._end(life, "success", "ended_success", why="completed")
        life.result = result
        return said

    def fail(
        self,
        reason: str,
        category: str = "transient",
        retry_policy: str | None = None,
        source: str | None = None,
        **given: Any,
    ) -> Any:
        life, triple = self._held(given)
        held = self._resolve(life, triple, source)
        if self._was_mine(life, triple, "failed"):
            return {"is": "TerminalFailed", "execution_id": life.execution_id}
        if life.phase == "runnable" and life.attempt_state == "pending_retry_attempt" and triple[1] == life.epoch:
            return self._retry_scheduled(life, life.delay or 0)
        self._check_lease(life, held)
        policy = life.policy.get("retry_policy") if retry_policy is None else _read(retry_policy)
        life.facts["failure_reason"] = reason
        if not _may_retry(policy, life.retries, category):
            self._end(life, "failed", "ended_failure", why="failed_terminal", reason=reason, category=category)
            return {"is": "TerminalFailed", "execution_id": life.execution_id}
        least, most = _backoff((policy or {}).get("backoff", {}), life.retries)
        assert least <= self._seen["delay_until"] - self.now <= most, "the backoff is out of its bounds"
        life.end_attempt(self.now, "ended_failure", reason, category)
        life.release(self.now, "failed_retry_scheduled")
        life.retries += 1
        life.attempt_id = None
        index = len(life.attempts) - 1
        life.pending = {"pending_retry_reason": reason, "pending_previous_attempt_index": index}
        life.delay = self._seen["delay_until"]
        life.detail = f"retry backoff until {life.delay} (attempt {index} failed: {reason})"
        life.vector(
            self.now,
            phase="runnable",
            eligibility="not_eligible_until_time",
            reason="waiting_for_retry_backoff",
            attempt_state="pending_retry_attempt",
        )
        return self._retry_scheduled(life, life.delay)

    def _retry_scheduled(self, life: Life, delay_until: int) -> dict[str, Any]:
        return {
            "is": "RetryScheduled",
            "execution_id": life.execution_id,
            "delay_until": delay_until,
            "next_attempt_index": len(life.attempts),
        }

    def _was_mine(self, life: Life, triple: Triple, outcome: str) -> bool:
        return life.outcome == outcome and (life.epoch, life.attempt_id) == triple[1:]

    def delay(self, delay_until: int, source: str | None = None, **given: Any) -> Any:
        life, triple = self._held(given)
        self._check_lease(life, self._resolve(life, triple, source))
        life.park(self.now, "worker_delay")
        life.delay, life.detail = delay_until, f"delayed until {delay_until}"
        life.vector(self.now, phase="runnable", eligibility="not_eligible_until_time", reason="waiting_for_delay")
        return {"is": "Delayed", "execution_id": life.execution_id, "public_state": "delayed"}

    def wait_children(self, source: str | None = None, **given: Any) -> Any:
        life, triple = self._held(given)
        self._check_lease(life, self._resolve(life, triple, source))
        life.park(self.now, "waiting_children")
        life.enter(self.now)  # Nothing is unresolved.
        return {"is": "Moved", "execution_id": life.execution_id, "public_state": "waiting"}

    # -- 4.15, 4.16 ---------------------------------------------------------------------------------------------------

    def cancel(self, handle: Any, reason: str = "") -> Any:
        life, triple = self._held({"handle": handle})
        return self._cancel(life, triple, "worker", reason)

    def cancel_execution(self, execution_id: str, reason: str, source: str, fence: Any = None) -> Any:
        triple = (fence.lease_id, fence.lease_epoch, fence.attempt_id) if fence else (None, None, None)
        return self._cancel(self.life(execution_id), triple, source, reason)

    def _cancel(self, life: Life, triple: Triple, source: str, reason: str) -> Any:
        said = {"is": "Cancelled", "execution_id": life.execution_id, "public_state": "cancelled"}
        if life.outcome == "cancelled":
            return said
        if life.phase == "terminal":
            raise life.not_active()
        if life.phase == "active" and source not in SYSTEM:
            if life.owner == "lease_revoked":
                raise Refused("lease_revoked")
            if None in triple[:2]:
                raise Refused("invalid_input", detail="fence_required")
            assert life.lease is not None
            if triple[:2] != (life.lease["id"], life.epoch) or triple[2] not in (None, life.attempt_id):
                raise Refused("stale_lease")
        by = {"operator_override": "operator", "flow_cascade": "operator", "system_timeout": "reconciler"}.get(
            source, "backend"
        )
        self._end(life, "cancelled", "ended_cancelled", why="cancelled", by=by, reason=f"cancelled: {reason}")
        life.facts |= {"cancellation_reason": reason, "cancelled_by": source or life.execution_id}
        return said

    def revoke_lease(self, execution_id: str, expected_lease_id: str, worker_instance_id: str, reason: str) -> Any:
        life = self.life(execution_id)
        if life.phase != "active":
            if worker_instance_id:
                raise life.not_active()
            return {"is": "AlreadySatisfied", "reason": "no_active_lease"}
        if life.is_interrupted():
            why = "already_revoked" if life.owner == "lease_revoked" else "already_expired"
            return {"is": "AlreadySatisfied", "reason": why}
        assert life.lease is not None
        if worker_instance_id not in ("", life.lease["instance"]):
            return {"is": "AlreadySatisfied", "reason": "different_worker_instance_id"}
        if expected_lease_id not in ("", life.lease["id"]):
            raise Refused("stale_lease")
        life.lease.update(revoked_at=self.now, revoke_reason=reason)
        life.owner, life.reason, life.attempt_state = "lease_revoked", "waiting_for_worker", "attempt_interrupted"
        life.detail = f"lease revoked: {reason}"
        life.mutation = self.now
        life.history.append(("revoked", self.now, life.epoch, reason, "operator"))
        return {"is": "Revoked", "lease_id": life.lease["id"], "lease_epoch": life.epoch}

    # -- 4.17, 4.19, 4.20, 3.6: effects of time -----------------------------------------------------------------------

    def mark_lease_expired_if_due(self, execution_id: str) -> Any:
        life = self.lives.get(execution_id)
        if life is None or life.phase != "active":
            why = "execution_not_found" if life is None else "not_active"
        elif life.is_interrupted():
            why = "already_revoked" if life.owner == "lease_revoked" else "already_expired"
        elif not life.has_lapsed(self.now):
            why = "not_yet_expired"
        else:
            life.mark_expired(self.now)
            return {"is": "MarkedExpired", "execution_id": execution_id}
        return {"is": "AlreadySatisfied", "reason": why}

    def expire_execution(self, execution_id: str, reason: str) -> Any:
        life = self.lives.get(execution_id)
        if life is None or life.phase == "terminal":
            return {"is": "AlreadyTerminal", "execution_id": execution_id}
        self._end(life, "expired", "ended_failure", why=f"expired:{reason}", reason=reason)
        life.facts["failure_reason"] = reason
        return {"is": "Expired", "execution_id": execution_id}

    def expire_if_due(self, execution_id: str, reason: str) -> Any:
        life = self.lives.get(execution_id)
        if life is not None and life.phase != "terminal":
            instant = life.timeout_at if reason == "attempt_timeout" else life.deadline
            if instant is None or instant > self.now:
                return {"is": "NotDue", "execution_id": execution_id}
        return self.expire_execution(execution_id, reason)

    def promote_delayed(self, execution_id: str) -> Any:
        life = self.lives.get(execution_id)
        if life is None:
            return "not_found_cleaned"
        if life.phase != "runnable":
            return "not_runnable_cleaned"
        if life.eligibility != "not_eligible_until_time":
            return "not_delayed_cleaned"
        if life.delay is not None and life.delay > self.now:
            return "not_yet_due"
        life.enter(self.now)
        return "promoted"

    def purge_execution(self, execution_id: str) -> Any:
        life = self.lives.get(execution_id)
        if life is None or life.phase != "terminal" or life.kept_until() > self.now:
            return False
        del self.lives[execution_id]
        return True

    def sweep_once(self, name: str) -> Any:
        instants = {life.execution_id: self._instant(life, name) for life in self.lives.values()}
        due = [execution_id for execution_id, instant in instants.items() if instant and instant <= self.now]
        later = [instant for instant in instants.values() if instant and instant > self.now]
        for execution_id in due:
            match name:
                case "lease_expiry":
                    self.mark_lease_expired_if_due(execution_id)
                case "delayed_promoter":
                    self.promote_delayed(execution_id)
                case "retention_trimmer":
                    self.purge_execution(execution_id)
                case _:
                    self.expire_if_due(execution_id, name)
        return {
            "is": "SweepResult",
            "processed": len(due),
            "errors": 0,
            "now": self.now,
            "next_at": min(later, default=None),
        }

    def _instant(self, life: Life, sweep: str) -> int | None:
        """Return when a sweep has something to do with an execution."""
        match sweep:
            case "lease_expiry":
                return life.lease["expires"] if life.owner == "leased" and life.lease else None
            case "delayed_promoter":
                return life.delay
            case "attempt_timeout":
                return life.timeout_at
            case "execution_deadline":
                return life.deadline
            case _:
                return life.kept_until() if life.phase == "terminal" else None

    # -- 4.21, 4.22, 1.7 ----------------------------------------------------------------------------------------------

    def change_priority(self, execution_id: str, new_priority: int) -> Any:
        life = self.life(execution_id)
        if life.phase != "runnable" or life.eligibility != "eligible_now":
            raise Refused("execution_not_eligible")
        old, life.priority = life.priority, min(9000, max(0, new_priority))
        life.mutation = self.now
        details = {"old_priority": old, "new_priority": life.priority}
        self.emitted.append(("operator", execution_id, self.now, "priority_changed", details))
        return {"is": "Changed", "execution_id": execution_id}

    def replay_execution(self, execution_id: str) -> Any:
        life = self.life(execution_id)
        if life.phase != "terminal":
            raise Refused("execution_not_terminal")
        if life.replays >= life.policy.get("max_replay_count", 10):
            raise Refused("max_replays_exhausted")
        life.replays += 1
        life.result = None
        started = life.facts.get("started_at")
        kept = ("started_at", "last_capability_mismatch_at")
        life.facts = {name: value for name, value in life.facts.items() if name in kept}
        assert started == life.facts.get("started_at")
        life.pending = {"pending_previous_attempt_index": len(life.attempts) - 1} if life.attempts else {}
        life.outcome, life.attempt_state = "none", "pending_replay_attempt"
        life.enter(self.now)
        life.history.append(("replay_initiated", self.now, None, None, None))
        self.emitted.append(("operator", execution_id, self.now, "replayed", ANY))
        return {"is": "Replayed", "public_state": "waiting"}

    def set_execution_tag(self, execution_id: str, key: str, value: str) -> Any:
        if key == "Bad":
            raise Refused("invalid_input")
        self._tag(self.life(execution_id), {key: value})

    def set_execution_tags(self, execution_id: str, pairs: dict[str, str]) -> Any:
        life = self.life(execution_id)
        if "Bad" in pairs:
            raise Refused("invalid_tag_key", detail="Bad")
        self._tag(life, pairs)
        return len(pairs)

    def _tag(self, life: Life, pairs: dict[str, str]) -> None:
        life.tags |= pairs
        life.mutation = self.now


def _read(retry_policy: str) -> Any:
    """Return the policy given with a failure; an unreadable one allows no retry."""
    try:
        return json.loads(retry_policy)
    except ValueError:
        return None


def _may_retry(policy: dict[str, Any] | None, retries: int, category: str) -> bool:
    """3.1"""
    if policy is None or category in ("permanent", "cancelled") or retries >= policy.get("max_retries", 3):
        return False
    return category in (policy.get("retryable_categories") or [category])


def _backoff(backoff: dict[str, Any], retries: int) -> tuple[int, int]:
    """Return the shortest and the longest backoff (3.1)."""
    if backoff.get("type") == "fixed":
        delay = backoff.get("delay_ms", 1000)
    elif backoff.get("type") == "exponential":
        grown = backoff.get("initial_delay_ms", 1000) * backoff.get("multiplier", 2.0) ** retries
        delay = int(min(grown, backoff.get("max_delay_ms", 60_000)))
    else:
        delay = 1000
    return (delay // 2 if backoff.get("jitter") else delay), delay
