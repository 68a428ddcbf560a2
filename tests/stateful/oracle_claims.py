"""The oracle, first half: how executions are created, granted and claimed.

Sections 4.1 to 4.8 and 4.18 of execution.md: each operation follows the numbered checks of its section.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest.mock import ANY

from flowfabric.clock import ManualClock
from tests.stateful.execution_model import Life, Refused

BLOCKS = {
    "waiting_for_budget": "blocked_by_budget",
    "waiting_for_quota": "blocked_by_quota",
    "waiting_for_capable_worker": "blocked_by_route",
    "paused_by_operator": "blocked_by_operator",
    "paused_by_policy": "blocked_by_lane_state",
}
KINDS = {"pending_first_attempt": "initial", "pending_retry_attempt": "retry", "pending_replay_attempt": "replay"}
OPERATOR = {"worker": "operator", "instance": "operator"}


class Claiming:
    """All executions, and how they are created, granted and claimed."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.lives: dict[str, Life] = {}
        self.keys: dict[tuple[int, str, str], tuple[str, int]] = {}
        self.can_sign = False
        self.emitted: list[tuple[Any, ...]] = []  # completions and operator events
        self._seen: Any = None  # the actual answer, for the minted ids
        self._marked: set[str] = set()  # the leases that were found expired

    @property
    def now(self) -> int:
        return self._clock.now

    def life(self, execution_id: str) -> Life:
        if execution_id not in self.lives:
            raise Refused("execution_not_found")
        return self.lives[execution_id]

    # -- 4.1 ----------------------------------------------------------------------------------------------------------

    def create_execution(self, execution_id: str, **asked: Any) -> Any:
        key = asked.get("idempotency_key")
        partition = int(execution_id[4 : execution_id.index("}")])
        scope = (partition, asked.get("namespace", "default"), key or "")
        if key and scope in self.keys and self.keys[scope][1] > self.now:
            return {"is": "Duplicate", "execution_id": self.keys[scope][0]}
        if execution_id in self.lives:
            if self.lives[execution_id].namespace != asked.get("namespace", "default"):
                raise Refused("id_in_other_namespace")
            return {"is": "Duplicate", "execution_id": execution_id}
        _check_policy(asked.get("policy"))
        if bad := next((tag for tag in asked.get("tags") or {} if tag == "Bad Key"), None):
            raise Refused("invalid_tag_key", detail=bad)
        life = self.lives[execution_id] = Life(execution_id, self.now, asked)
        window = life.policy.get("dedup_window_ms", 24 * 60 * 60 * 1000)
        if key and window:
            self.keys[scope] = (execution_id, self.now + window)
        return {"is": "Created", "execution_id": execution_id, "public_state": life.public}

    def create_executions(self, asks: Iterable[Any]) -> Any:
        return [
            self.create_execution(
                ask.execution_id,
                namespace=ask.namespace,
                lane_id=ask.lane_id,
                priority=ask.priority,
                idempotency_key=ask.idempotency_key,
            )
            for ask in asks
        ]

    # -- 4.2 to 4.5 ---------------------------------------------------------------------------------------------------

    def issue_claim_grant(
        self, execution_id: str, lane_id: str, worker_capabilities: Iterable[str], grant_ttl_ms: int, **worker: str
    ) -> Any:
        life = self.life(execution_id)
        if life.phase != "runnable" or life.eligibility != "eligible_now":
            raise Refused("execution_not_eligible")
        if life.is_granted(self.now):
            raise Refused("grant_already_exists")
        if lane_id != life.lane:
            raise Refused("execution_not_in_eligible_set")
        if missing := life.required - set(worker_capabilities):
            life.facts["last_capability_mismatch_at"] = life.mutation = self.now
            raise Refused("capability_mismatch", detail=",".join(sorted(missing)))
        self._grant(life, worker["worker_id"], grant_ttl_ms)
        return {"is": "Granted", "execution_id": execution_id}

    def _grant(self, life: Life, worker_id: str, ttl: int) -> int:
        life.grant = {"worker": worker_id, "expires": self.now + ttl}
        life.mutation = self.now
        return self.now + ttl

    def claim_execution(
        self,
        execution_id: str,
        lease_ttl_ms: int = 15_000,
        attempt_timeout_ms: int | None = None,
        execution_deadline_at: int | None = None,
        lane_id: str = "",
        **worker: str,
    ) -> Any:
        life = self.life(execution_id)
        self._check_leaseable(life)
        if life.attempt_state == "running_attempt":
            raise Refused("active_attempt_exists")
        if life.attempt_state == "attempt_interrupted":
            raise Refused("use_claim_resumed_execution")
        self._check_grant(life, worker["worker_id"])
        holder = _holder(worker, lane_id, lease_ttl_ms)
        timeout = life.own_timeout() if attempt_timeout_ms is None else attempt_timeout_ms
        claimed = self._fresh(life, holder, self._seen, timeout=timeout)
        life.deadline = execution_deadline_at or life.deadline
        return claimed

    def claim_resumed_execution(
        self,
        execution_id: str,
        lease_ttl_ms: int = 15_000,
        remaining_attempt_timeout_ms: int | None = None,
        lane_id: str = "",
        **worker: str,
    ) -> Any:
        life = self.life(execution_id)
        if life.phase != "runnable":
            raise Refused("execution_not_leaseable")
        if life.attempt_state != "attempt_interrupted":
            raise Refused("not_a_resumed_execution")
        self._check_leaseable(life)
        try:
            self._check_grant(life, worker["worker_id"])
        except Refused as refused:
            if refused.words["refused"] == "claim_grant_expired":
                life.grant, life.mutation = None, self.now
            raise
        holder = _holder(worker, lane_id, lease_ttl_ms)
        return self._resumed(life, holder, self._seen, "claim_resumed", remaining_attempt_timeout_ms)

    def claim_from_resume_grant(self, grant: Any, lease_ttl_ms: int, **worker: str) -> Any:
        claimed = self.claim_resumed_execution(grant.execution_id, lease_ttl_ms, None, grant.lane_id, **worker)
        return claimed["handle"]

    def issue_grant_and_claim(self, execution_id: str, lane_id: str, lease_duration_ms: int) -> Any:
        life = self.life(execution_id)
        if life.phase != "runnable":
            raise Refused("execution_not_eligible")
        if life.is_granted(self.now):
            raise Refused("grant_already_exists")
        if life.eligibility != "eligible_now":
            raise Refused("execution_not_eligible")
        if lane_id != life.lane:
            raise Refused("execution_not_in_eligible_set")
        holder = {**OPERATOR, "lane": lane_id, "ttl": lease_duration_ms}
        ids = {"attempt_id": ANY, **self._seen}
        if life.attempt_state == "attempt_interrupted":
            self._resumed(life, holder, ids, "issue_grant_and_claim_resumed", None)
        else:
            self._fresh(life, holder, ids, why="issue_grant_and_claim", timeout=life.own_timeout())
        index = len(life.attempts) - 1
        return {"is": "OperatorClaim", "lease_id": ANY, "lease_epoch": life.epoch, "attempt_index": index}

    def _check_leaseable(self, life: Life) -> None:
        if life.phase != "runnable" or life.eligibility != "eligible_now" or life.outcome != "none":
            raise Refused("execution_not_leaseable")
        if life.owner != "unowned":
            raise Refused("lease_conflict")

    def _check_grant(self, life: Life, worker_id: str) -> None:
        if life.grant is None or life.grant["worker"] != worker_id:
            raise Refused("invalid_claim_grant")
        if not life.is_granted(self.now):
            raise Refused("claim_grant_expired")

    def _fresh(
        self, life: Life, holder: dict[str, Any], ids: Any, *, why: str | None = None, timeout: int | None
    ) -> dict[str, Any]:
        kind = KINDS[life.attempt_state]
        life.acquire(self.now, holder, ids, "acquired", why)
        life.begin(self.now, holder, ids, kind, timeout)
        return self._claimed(life, "Fresh")

    def _resumed(self, life: Life, holder: dict[str, Any], ids: Any, why: str, timeout: int | None) -> dict[str, Any]:
        life.acquire(self.now, holder, ids, "acquired", why)
        life.resume(self.now, timeout)
        return self._claimed(life, "Resumed")

    def _claimed(self, life: Life, kind: str) -> dict[str, Any]:
        lease, attempt = life.lease or {}, life.attempts[-1]
        shared = {
            "execution_id": life.execution_id,
            "lease_id": lease["id"],
            "lease_epoch": life.epoch,
            "attempt_index": attempt["attempt_index"],
            "attempt_id": attempt["attempt_id"],
        }
        handle = {
            "handle": kind,
            **shared,
            "lease_ttl_ms": lease["ttl"],
            "lane_id": life.current_lane,
            "worker_instance_id": lease["instance"],
        }
        return {
            "is": "Claimed",
            **shared,
            "attempt_type": attempt["attempt_type"],
            "lease_expires_at": lease["expires"],
            "handle": handle,
            "payload": None,
            "namespace": None,
            "life": 0,  # none of the oracle's verbs continues a run as new
        }

    # -- 4.6, 4.7 -----------------------------------------------------------------------------------------------------

    def claim(self, **order: Any) -> Any:
        claimed = self._pull(limit=1, seen=[self._seen] if self._seen else [], **order)
        return claimed[0] if claimed else None

    def claim_many(self, limit: int, **order: Any) -> Any:
        return self._pull(limit=limit, seen=self._seen, **order)

    def _pull(
        self, lane_id: str, limit: int, seen: list[Any], capabilities: Iterable[str], lease_ttl_ms: int, **worker: str
    ) -> list[Any]:
        lapsed = {life.execution_id for life in self._lapsed(lane_id)}
        # A claim with other work may or may not scan its lane for expired leases; it finds all of them or none.
        if self._marked or not any(self._candidates(lane_id, set(capabilities))):
            assert self._marked == lapsed, f"{lapsed} had lapsed, {self._marked} were marked"
            self._mark_lapsed(lane_id)
        claimed: list[Any] = []
        holder = _holder(worker, "", lease_ttl_ms)
        for life in list(self._candidates(lane_id, set(capabilities))):
            if len(claimed) == limit:
                break
            ids = seen[len(claimed)] if len(claimed) < len(seen) else {"lease_id": ANY, "attempt_id": ANY}
            common = {"payload": self._payload(life), "namespace": life.namespace}
            if life.is_interrupted():
                if life.reclaims >= self._cap(life, None):
                    self._end_at_cap(life)
                    continue
                claimed.append({**self._reclaimed(life, {**holder, "lane": lane_id}, ids), **common})
            elif life.attempt_state == "attempt_interrupted":
                claimed.append({**self._resumed(life, holder, ids, "claim_resumed", None), **common})
            else:
                claimed.append({**self._fresh(life, holder, ids, timeout=life.own_timeout()), **common})
        return claimed

    def _payload(self, life: Life) -> dict[str, Any]:
        return {
            "is": "Payload",
            "execution_id": life.execution_id,
            "execution_kind": "task",
            "creator_identity": "",
            "input_payload": life.payload,
            "payload_encoding": None,
            "policy": ANY,
        }

    def _lapsed(self, lane_id: str) -> list[Life]:
        return [life for life in self.lives.values() if life.lane == lane_id and life.has_lapsed(self.now)]

    def _mark_lapsed(self, lane_id: str) -> None:
        for life in self._lapsed(lane_id):
            life.mark_expired(self.now)

    def _candidates(self, lane_id: str, offered: set[str]) -> list[Life]:
        """Return the executions of the lane that this worker could claim, best first."""
        found = [
            life
            for life in self.lives.values()
            if life.lane == lane_id
            and life.required <= offered
            and not life.is_granted(self.now)
            and (life.is_interrupted() or life.eligibility in ("eligible_now", "blocked_by_route"))
        ]
        return sorted(found, key=lambda life: life.position)

    def _beyond(self, lane_id: str, offered: set[str]) -> list[Life]:
        """Return the executions of the lane that require more capabilities than this worker offers."""
        return [
            life
            for life in self.lives.values()
            if life.lane == lane_id
            and not life.required <= offered
            and not life.is_granted(self.now)
            and life.eligibility == "eligible_now"
        ]

    def claim_for_worker(
        self, lane_id: str, capabilities: Iterable[str], grant_ttl_ms: int, worker_id: str, worker_instance_id: str
    ) -> Any:
        self._check_signer()
        self._mark_lapsed(lane_id)
        offered = set(capabilities)
        looked_at = self._candidates(lane_id, offered) + self._beyond(lane_id, offered)
        for life in sorted(looked_at, key=lambda life: life.position):
            if not life.required <= offered:  # No worker is registered in these sequences.
                life.vector(self.now, eligibility="blocked_by_route", reason="waiting_for_capable_worker")
                life.detail = "no connected worker satisfies required_capabilities"
                continue
            kind = "ReclaimGrant" if life.is_interrupted() else "ClaimGrant"
            if life.is_interrupted() and life.reclaims >= self._cap(life, None):
                self._end_at_cap(life)
                continue
            if life.eligibility == "blocked_by_route":
                life.enter(self.now)  # in the same step
            return self._signed(kind, life, self._grant(life, worker_id, grant_ttl_ms), lane_id)
        return None

    def _signed(self, kind: str, life: Life, expires: int, lane_id: str) -> dict[str, Any]:
        more = {"resumes": life.attempt_state == "attempt_interrupted"} if kind == "ClaimGrant" else {}
        return more | {
            "is": kind,
            "execution_id": life.execution_id,
            "partition_key": f"{{fp:{life.partition}}}",
            "grant_key": ANY,
            "expires_at_ms": expires,
            "lane_id": lane_id,
        }

    def _check_signer(self) -> None:
        if not self.can_sign:
            raise Refused("unavailable")

    def seed_waitpoint_hmac_secret(self, kid: str, secret_hex: str) -> Any:
        self.can_sign = True
        return {"is": "KeySeeded", "kid": kid}

    # -- 4.8 ----------------------------------------------------------------------------------------------------------

    def block_execution_for_admission(self, execution_id: str, reason: str, detail: str) -> Any:
        rejected = {"is": "Rejected", "message": ANY}
        life = self.lives.get(execution_id)
        if life is None or life.phase != "runnable" or life.eligibility != "eligible_now":
            return rejected
        if reason not in BLOCKS:
            raise Refused("invalid_blocking_reason")
        life.vector(self.now, eligibility=BLOCKS[reason], reason=reason)
        life.detail = detail
        return {"is": "Blocked", "execution_id": execution_id, "reason": reason}

    def block_route(self, execution_id: str) -> Any:
        detail = "no connected worker satisfies required_capabilities"
        return self.block_execution_for_admission(execution_id, "waiting_for_capable_worker", detail)

    def unblock_execution(self, execution_id: str, expected_reason: str | None) -> Any:
        if expected_reason == "paused_by_flow_cancel":
            raise Refused("invalid_blocking_reason")
        life = self.life(execution_id)
        unblockable = {f"blocked_by_{what}" for what in ("budget", "quota", "route", "operator")}
        if life.phase != "runnable" or life.eligibility not in unblockable:
            raise Refused("execution_not_eligible")
        if expected_reason and life.reason != expected_reason:
            raise Refused("execution_not_eligible")
        life.enter(self.now)
        return {"is": "Unblocked", "execution_id": execution_id}

    # -- 4.18 ---------------------------------------------------------------------------------------------------------

    def issue_reclaim_grant(
        self, execution_id: str, lane_id: str, worker_capabilities: Iterable[str], grant_ttl_ms: int, **worker: str
    ) -> Any:
        life = self.life(execution_id)
        if life.has_lapsed(self.now):
            life.mark_expired(self.now)
        if not life.is_interrupted():
            return {"is": "NotReclaimable", "detail": "execution_not_reclaimable"}
        cap = self._cap(life, None)
        if life.reclaims >= cap:
            return {"is": "ReclaimCapExceeded", "reclaim_count": cap}
        if life.is_granted(self.now):
            raise Refused("grant_already_exists")
        if missing := life.required - set(worker_capabilities):
            life.facts["last_capability_mismatch_at"] = life.mutation = self.now
            return {"is": "NotReclaimable", "detail": f"capability_mismatch: {','.join(sorted(missing))}"}
        self._check_signer()
        return self._signed("ReclaimGrant", life, self._grant(life, worker["worker_id"], grant_ttl_ms), lane_id)

    def reclaim_execution(
        self,
        execution_id: str,
        lease_ttl_ms: int = 15_000,
        max_reclaim_count: int | None = None,
        lane_id: str = "",
        **worker: str,
    ) -> Any:
        life = self.life(execution_id)
        if not life.is_interrupted():
            return {"is": "NotReclaimable", "detail": "execution_not_reclaimable"}
        cap = self._cap(life, max_reclaim_count)
        if life.reclaims >= cap:
            self._end_at_cap(life)
            return {"is": "ReclaimCapExceeded", "reclaim_count": cap}
        if not life.is_granted(self.now) or (life.grant or {})["worker"] != worker["worker_id"]:
            return {"is": "GrantNotFound", "execution_id": execution_id}
        return self._reclaimed(life, _holder(worker, lane_id, lease_ttl_ms), self._seen)

    def _cap(self, life: Life, asked: int | None) -> int:
        own: int | None = life.policy.get("max_reclaim_count")
        return own if own is not None else 1000 if asked is None else asked

    def _reclaimed(self, life: Life, holder: dict[str, Any], ids: Any) -> dict[str, Any]:
        why = life.owner.removesuffix("_reclaimable")
        last = len(life.attempts) - 1
        life.end_attempt(self.now, "interrupted_reclaimed", why)
        life.reclaims += 1
        timeout = life.whole_timeout()
        life.acquire(self.now, holder, ids, "reclaimed", None)
        life.begin(self.now, holder, ids, "reclaim", timeout)
        life.attempts[-1]["lineage"] |= {"previous_attempt_index": last, "reclaim_reason": why}
        return self._claimed(life, "Reclaimed")

    def _end_at_cap(self, life: Life) -> None:
        why = life.owner.removesuffix("_reclaimable")
        self._end(life, "failed", "interrupted_reclaimed", why="max_reclaims_exceeded", by="reconciler", reason=why)
        life.facts["failure_reason"] = "max_reclaims_exceeded"

    def _end(self, life: Life, outcome: str, attempt: str, **how: Any) -> None:
        life.end(self.now, outcome, attempt, **how)
        tag = life.tags.get("cairn.instance_id")
        self.emitted.append(("completion", life.execution_id, self.now, outcome, life.namespace, tag))


def _holder(worker: dict[str, str], lane: str, ttl: int) -> dict[str, Any]:
    return {"worker": worker["worker_id"], "instance": worker["worker_instance_id"], "lane": lane, "ttl": ttl}


def _check_policy(policy: Any) -> None:
    """Return what is invalid in a policy (1.6)."""
    if isinstance(policy, str):
        raise Refused("invalid_policy_json", **({} if policy == "[]" else {"detail": "malformed"}))
    routing = (policy or {}).get("routing_requirements", {})
    if not isinstance(routing, dict):
        raise Refused("invalid_policy_json", detail="routing_requirements:not_object")
    required = routing.get("required_capabilities", [])
    if not isinstance(required, list):
        raise Refused("invalid_capabilities", detail="required:not_array")
    if any("," in token for token in required):
        raise Refused("invalid_capabilities", detail="required:comma_in_token")
    if (policy or {}).get("max_reclaim_count", 0) < 0:
        raise Refused("invalid_policy_json")
