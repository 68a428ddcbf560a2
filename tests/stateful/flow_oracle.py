"""The flow oracle: joins, skips, data passing and replays, written from the specification (2.5 to 2.12, 4).

It knows nothing of rules, rows or folds: members, edges and joins are objects in dictionaries, and outcomes are
dispatched to their dependents one by one. Siblings of a fired join are cancelled when the present outcomes have been
dispatched. In the late variant outcomes are dispatched one by one, a pass finds what was not dispatched, and another
one cancels siblings.
"""

from __future__ import annotations

from collections import deque

OUTCOMES = {
    "completed": "success",
    "failed": "failed",
    "cancelled": "cancelled",
    "expired": "expired",
    "skipped": "skipped",
}


class Member:
    def __init__(self, payload: bytes) -> None:
        self.state = "waiting"
        self.attempt = "pending_first_attempt"
        self.payload = payload
        self.result: bytes | None = None
        self.has_run = False
        self.replays = 0

    @property
    def is_over(self) -> bool:
        return self.state in OUTCOMES


class Edge:
    def __init__(self, upstream: str, downstream: str, kind: str, *, passes: bool) -> None:
        self.upstream, self.downstream, self.kind, self.passes = upstream, downstream, kind, passes
        self.state = "unsatisfied"
        self.known_at = 0  # since when the outcome of the upstream, if it has finished, could have been dispatched

    def satisfies(self, outcome: str) -> bool:
        return self.kind == "any_outcome" or (outcome == "success") == (self.kind == "success_only")


class Join:
    def __init__(self, kind: str = "all_of", k: int = 1, on_satisfied: str | None = None) -> None:
        self.kind, self.k, self.on_satisfied = kind, k, on_satisfied
        self.staged = self.n = self.succeeded = self.failed = self.skipped = 0
        self.state = "pending"
        self.siblings: list[str] | None = None  # the siblings that remain to be cancelled

    @property
    def requires_too_much(self) -> bool:
        return self.kind != "all_of" and self.k > self.n

    def evaluate(self) -> str:
        bad, needed = self.failed + self.skipped, self.n if self.kind == "all_of" else self.k
        if self.succeeded >= needed:
            return "satisfied"
        return "impossible" if bad > self.n - needed else "pending"

    def __str__(self) -> str:
        return f"{self.succeeded}/{self.failed}/{self.skipped} of {self.n} {self.state}"


class FlowOracle:
    """One flow."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.joins: dict[str, Join] = {}
        self.edges: dict[str, Edge] = {}
        self._ended: deque[str] = deque()
        self.now = 0

    def join(self, name: str) -> Join:
        return self.joins.setdefault(name, Join())

    # -- operations of callers ----------------------------------------------------------------------------------------

    def apply(self, edge_id: str, edge: Edge) -> None:
        join, child = self.join(edge.downstream), self.members[edge.downstream]
        join.n += 1
        if join.kind == "all_of" and join.state == "satisfied":
            join.state = "pending"
        self.edges[edge_id] = edge
        edge.known_at = self.now
        if child.state in ("waiting", "waiting_children") and join.state == "pending":
            child.state = "waiting_children"

    def claim(self, name: str) -> None:
        member = self.members[name]
        member.state, member.attempt, member.has_run = "active", "running_attempt", True

    def park(self, name: str) -> None:
        join, member = self.joins.get(name), self.members[name]
        waits = join is not None and join.n > 0 and join.state == "pending"
        member.state, member.attempt = "waiting_children" if waits else "waiting", "attempt_interrupted"

    def end(self, name: str, state: str, result: bytes | None = None) -> None:
        member = self.members[name]
        member.state, member.result = state, result
        if member.has_run:
            member.attempt = "attempt_terminal"
        self._over(name)

    def _over(self, name: str) -> None:
        self._ended.append(name)
        for edge in self.edges.values():
            if edge.upstream == name:
                edge.known_at = self.now

    def replay(self, name: str) -> None:
        member = self.members[name]
        was, member.state = member.state, "waiting"
        member.result, member.attempt, member.replays = None, "pending_replay_attempt", member.replays + 1
        if was != "skipped":
            return
        if self.joins[name].requires_too_much:  # It is skipped again, and its join stays as it is.
            member.state, member.attempt = "skipped", "none"
            self._over(name)
            return
        inbound = [edge for edge in self.edges.values() if edge.downstream == name]
        for edge in inbound:
            if edge.state != "satisfied":
                edge.state, edge.known_at = "unsatisfied", self.now
        join = self.joins[name]
        join.siblings = None
        join.succeeded, join.failed, join.skipped = sum(edge.state == "satisfied" for edge in inbound), 0, 0
        join.state = "satisfied" if join.evaluate() == "satisfied" else "pending"
        if join.state == "pending":
            member.state = "waiting_children"
        else:
            self._flag(name)

    # -- background work ----------------------------------------------------------------------------------------------

    def dispatch_all(self) -> None:
        """Dispatch every outcome to its dependents until nothing follows from it."""
        self._tell_ended()
        while self.cancel_siblings():
            self._tell_ended()

    def dispatch(self, name: str) -> None:
        """Dispatch the outcome of one member, if it has finished, and those of the members skipped by it."""
        self._ended.clear()
        if self.members[name].is_over:
            self._ended.append(name)
        self._tell_ended()

    def _tell_ended(self) -> None:
        while self._ended:
            name = self._ended.popleft()
            for edge_id in sorted(key for key, edge in self.edges.items() if edge.upstream == name):
                self._resolve(self.edges[edge_id])

    def cancel_siblings(self) -> bool:
        """Cancel the siblings that fired joins no longer need; return True if there were such joins."""
        fired = [join for _, join in sorted(self.joins.items()) if join.siblings is not None]
        for join in fired:
            siblings, join.siblings = join.siblings or [], None
            for name in siblings:
                if not self.members[name].is_over:
                    self.end(name, "cancelled")
        return bool(fired)

    def reconcile(self) -> None:
        """Find the edges whose upstream has finished and whose outcome was not dispatched."""
        self._ended.clear()
        found = [key for key, edge in self.edges.items() if self.members[edge.upstream].is_over]
        for edge_id in sorted(found, key=lambda key: (self.edges[key].known_at, key)):
            self._resolve(self.edges[edge_id])
        self._tell_ended()

    def _resolve(self, edge: Edge) -> None:
        if edge.state != "unsatisfied":
            return
        upstream, child, join = self.members[edge.upstream], self.members[edge.downstream], self.joins[edge.downstream]
        well = edge.satisfies(OUTCOMES[upstream.state])
        edge.state = "satisfied" if well else "impossible"
        join.succeeded += well
        join.skipped += not well and upstream.state == "skipped"
        join.failed += not well and upstream.state != "skipped"
        if join.state != "pending":
            return
        join.state = join.evaluate()
        hands_on = well and edge.passes and (join.kind == "all_of" or join.state == "satisfied")
        if hands_on and upstream.result is not None and not child.is_over:
            child.payload = upstream.result
        if join.state == "pending":
            return
        self._flag(edge.downstream)
        if join.state == "satisfied" and child.state == "waiting_children":
            child.state = "waiting"
        if join.state == "impossible" and not child.is_over:
            had_open_attempt = child.attempt in ("running_attempt", "attempt_interrupted")
            child.state, child.attempt = "skipped", "attempt_terminal" if had_open_attempt else "none"
            self._over(edge.downstream)

    def _flag(self, name: str) -> None:
        if self.joins[name].on_satisfied == "cancel_remaining":
            upstreams = {edge.upstream for edge in self.edges.values() if edge.downstream == name}
            self.joins[name].siblings = sorted(one for one in upstreams if not self.members[one].is_over)
