"""Two tenants with rows of every kind, create over HTTP, and a third whose ids do not exist.

Every text in a tenant's rows contains the tenant's secret. Ids do not, nor do the few names that another tenant could
guess (the shared lane, names of gates and workers): a response that contains the secret is a leak.
"""

from __future__ import annotations

import re
import uuid
from base64 import b64encode
from typing import Any
from urllib.parse import quote

import msgspec

from flowfabric.handles import Handle, HandleKind
from flowfabric.ids import FlowId, PartitionCounts, flow_partition
from flowfabric.server import App
from tests.security.client import Request, send

ROOT = "the-root-token-of-this-server"
PARTITION = 7  # shared by all rows, so that lookups by partition and id could find rows of the other tenant
SHARED_LANE = "L"
HOUR_MS = 3_600_000
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
BUDGET, QUOTA = str(uuid.UUID(int=0xB)), str(uuid.UUID(int=0xC))  # both tenants have one of this id


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """The ids of a tenant's rows, by role."""

    namespace: str
    secret: str
    waiting: str  # claimable in the shared lane
    active: str  # call_lease; with steps, waits, output, a child and a reservation
    handle: str  # belongs to the active execution
    child: str  # belongs to the active execution
    pending: str  # a waitpoint of the active one that unknown_tenant waits for yet
    voted: str = "votes"  # the gate of the active one that signals closed
    timer: str = "timer"  # the gate of the active one that is open
    fact: str = "shown"  # a fact of the active one
    asked: str  # a message to the active one that was replied to
    question: str  # one that was not
    suspended: str
    waitpoint: str  # belongs to the suspended execution
    link: str  # the token of that waitpoint
    ended: str  # completed, with a result and a closed stream
    revoked: str  # its lease was taken away
    granted: str  # offered to a worker
    grant_key: str
    flow: str
    source: str  # a member, joined to the target
    target: str
    other: str  # a member without edges
    sink: str  # a member with a staged edge from the source
    edge: str  # that edge
    spare: str  # no member, on the flow's partition
    limited: str  # waits for the budget
    budget: str
    quota: str
    reservation: str  # a reservation of the active execution in the budget
    own_budget: str  # an id that the other tenant has no budget of
    instance: str  # a registered worker
    key: str  # the idempotency key of the waiting one
    api_token: str  # its id
    schedule: str  # a schedule's name, unlike that of the other tenant
    last: str  # the one that the newest event of every feed is about

    def hides(self, text: str) -> bool:
        """True if a text does not contain the secret, neither plain nor in base64."""
        return not any(form in text for form in forms(self.secret))


def forms(secret: str) -> tuple[str, ...]:
    """Return the forms of a text in a response: plain, and in base64 at any offset."""
    raw = secret.encode()
    # Without the letters at both ends, which depend on the bytes beside the secret.
    return (secret, *(b64encode(b"\0" * shift + raw).decode()[4:-4] for shift in range(3)))


def execution() -> str:
    """Return a new execution id on the partition of all rows."""
    return f"{{fp:{PARTITION}}}:{uuid.uuid4()}"


def flow() -> str:
    """Return a new flow id on the partition of all rows."""
    while True:
        made = str(uuid.uuid4())
        if flow_partition(FlowId(made), PartitionCounts()) == PARTITION:
            return made


def segment(text: str) -> str:
    return quote(text, safe=":")


def creation(namespace: str, **fields: Any) -> dict[str, Any]:
    made = {"namespace": namespace, "lane_id": "quiet", "execution_kind": "task", "input_payload": []}
    return made | {"execution_id": execution()} | fields


class Seed:
    """Creates the rows of one tenant with the root token."""

    def __init__(self, app: App, namespace: str, secret: str) -> None:
        self.app = app
        self.namespace = namespace
        self.secret = secret
        self.octets = list(secret.encode())

    async def send_request(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request that has to succeed; return the decoded body."""
        answer = await send(self.app, Request(method, path, {}, body), f"Bearer {ROOT}")
        assert answer.status < 300, f"{method} {path}: {answer.text}"
        return msgspec.json.decode(answer.body) if answer.body else None

    async def create(self, **fields: Any) -> str:
        """Create an execution; return its id."""
        body = creation(
            self.namespace,
            execution_kind=f"kind-{self.secret}",
            input_payload=self.octets,
            creator_identity=self.secret,
            tags={"t.about": self.secret, f"t.{self.secret}": "1"},
        )
        await self.send_request("POST", "/v1/executions", body | fields)
        return str((body | fields)["execution_id"])

    async def claim(self, role: str, **fields: Any) -> tuple[str, str]:
        """Create and claim an execution; return its id and handle."""
        lane = f"{role}-{self.secret}"
        made = await self.create(lane_id=lane, **fields)
        claim_body = {"worker_instance_id": f"i-{self.secret}", "lanes": [lane], "lease_ttl_ms": HOUR_MS}
        [work] = (await self.send_request("POST", f"/v1/workers/w-{self.secret}/claims", claim_body))["claimed"]
        assert work["execution_id"] == made
        return made, work["handle"]

    async def call_lease(self, verb: str, handle: str, **body: Any) -> Any:
        """Call a route of the lease holder."""
        return await self.send_request("POST", f"/v1/leases/{verb}", {"handle": handle} | body)

    async def signal(self, execution_id: str, waitpoint_id: str, token: str) -> None:
        body = {
            "execution_id": execution_id,
            "waitpoint_id": waitpoint_id,
            "waitpoint_token": token,
            "signal_name": f"signal-{self.secret}",
            "signal_category": self.secret,
            "source_type": "user",
            "source_identity": self.secret,
            "payload": self.octets,
        }
        await self.send_request("POST", f"/v1/executions/{segment(execution_id)}/signal", body)

    async def tenant(self) -> Tenant:
        """Create all rows."""
        limits = await self._limits()
        work = await self._work(limits["budget"])
        return Tenant(
            namespace=self.namespace,
            secret=self.secret,
            **limits,
            **work,
            **await self._waits(),
            **await self._flow(),
            **await self._registry(),
            schedule=await self._schedule(),
            last=await self._last(),
        )

    async def _schedule(self) -> str:
        name = str(uuid.uuid4())
        run = creation(self.namespace, execution_kind=f"kind-{self.secret}", input_payload=self.octets)
        await self.send_request("PUT", f"/v1/schedules/{name}", {"spec": {"every_ms": HOUR_MS}, "run": run})
        return name

    async def _limits(self) -> dict[str, str]:
        own = str(uuid.uuid4())
        for budget_id in (BUDGET, own):
            body = {
                "namespace": self.namespace,
                "budget_id": budget_id,
                "scope_type": "lane",
                "scope_id": self.secret,
                "enforcement_mode": "strict",
                "on_hard_limit": "fail",
                "on_soft_limit": "warn",
                "reset_interval_ms": 0,
                "dimensions": ["tokens", f"dim-{self.secret}"],
                "hard_limits": [1000, 1000],
                "soft_limits": [0, 0],
            }
            await self.send_request("POST", "/v1/budgets", body)
            usage = {"namespace": self.namespace, "dimensions": {"tokens": 1, f"dim-{self.secret}": 1}}
            await self.send_request("POST", f"/v1/budgets/{budget_id}/usage", usage)
        quota = {"window_seconds": 60, "max_requests_per_window": 9, "max_concurrent": 9, "quota_policy_id": QUOTA}
        await self.send_request("POST", "/v1/quotas", quota | {"namespace": self.namespace})
        policy = {"budget_ids": [BUDGET], "quota_policy_ids": [QUOTA]}
        limited, _ = await self.claim("limited", policy=policy)
        return {"budget": BUDGET, "own_budget": own, "quota": QUOTA, "limited": limited}

    async def _work(self, budget_id: str) -> dict[str, str]:
        key = str(uuid.uuid4())
        waiting = await self.create(lane_id=SHARED_LANE, priority=9, idempotency_key=key)
        active, handle = await self.claim("active")
        path = f"/v1/executions/{segment(active)}"
        await self.call_lease("progress", handle, pct=1, message=self.secret)
        await self.call_lease("tags", handle, tags={"ff.show": f'"{self.secret}"'})
        await self.call_lease("steps", handle, name=f"step-{self.secret}", occurrence=0, result=self.octets)
        await self.call_lease("frames", handle, frames=[{"payload": self.octets, "frame_type": self.secret}])
        pending = await self.call_lease("waitpoints", handle, waitpoint_key=f"wpk:{self.secret}", expires_in_ms=HOUR_MS)
        message = {"mailbox": "mail", "payload": self.octets, "sender": self.secret}
        await self.send_request("POST", f"{path}/messages", message)
        await self.call_lease("gates", handle, name="mail", kind="mailbox", mailbox="mail")
        vote, any_vote = str(uuid.uuid4()), {"Single": {"waitpoint_key": "v", "matcher": "Wildcard"}}
        asked = {"name": "votes", "kind": "signals", "condition": any_vote, "waitpoints": [[vote, "v"]]}
        opened = await self.call_lease("gates", handle, **asked)
        await self.signal(active, vote, opened["OpenedGate"]["links"][0]["token"])
        await self.call_lease("gates", handle, name="timer", kind="timer", expires_in_ms=HOUR_MS)
        await self.send_request("POST", f"{path}/messages", message | {"mailbox": self.secret})  # stays unread
        await self.call_lease("facts", handle, name="shown", place="shown", count=1, value=self.octets)
        replied, question = str(uuid.uuid4()), str(uuid.uuid4())
        for message_id in (replied, question):
            await self.send_request("POST", f"{path}/asks", message | {"mailbox": "asks", "message_id": message_id})
        await self.call_lease(
            "reply", handle, message_id=replied, payload=self.octets, memo={"name": f"reply:{self.secret}"}
        )
        reservation = str(uuid.uuid4())
        kept = {"budget_id": budget_id, "reservation_id": reservation, "namespace": self.namespace}
        await self.send_request("POST", f"{path}/reserve", kept | {"amounts": {"tokens": 1}, "ttl_ms": HOUR_MS})
        spent = {"budget_id": budget_id, "namespace": self.namespace, "dimensions": {f"dim-{self.secret}": 1}}
        await self.send_request("POST", f"{path}/spend", spent | {"idempotency_key": self.secret})
        ended, done = await self.claim("ended")
        await self.call_lease("frames", done, frames=[{"payload": self.octets, "frame_type": self.secret}])
        await self.call_lease("complete", done, result=self.octets)
        return {
            "waiting": waiting,
            "active": active,
            "handle": handle,
            "pending": pending["waitpoint_id"],
            "reservation": reservation,
            "asked": replied,
            "question": question,
            "child": await self.create(parent_id=active),
            "ended": ended,
            "key": key,
        }

    async def _waits(self) -> dict[str, str]:
        suspended, handle = await self.claim("suspended")
        waits = {"Single": {"waitpoint_key": f"wpk:{self.secret}", "matcher": "Wildcard"}}
        points = [{"Fresh": {"waitpoint_key": f"wpk:{self.secret}"}}]
        reply = await self.call_lease("suspend", handle, waitpoints=points, resume_condition=waits)
        [point] = reply["Suspended"]["waitpoints"]
        revoked, _ = await self.claim("revoked")
        await self.send_request("POST", f"/v1/executions/{segment(revoked)}/revoke-lease")
        granted = await self.create(lane_id=f"granted-{self.namespace}")
        claim_body = {"lane_id": f"granted-{self.namespace}", "worker_instance_id": "i", "grant_ttl_ms": 60_000}
        grant = await self.send_request("POST", "/v1/workers/w/claim", claim_body)
        assert grant["execution_id"] == granted
        return {
            "suspended": suspended,
            "waitpoint": point["waitpoint_id"],
            "link": point["waitpoint_token"],
            "revoked": revoked,
            "granted": granted,
            "grant_key": grant["grant_key"],
        }

    async def _flow(self) -> dict[str, str]:
        flow_id = flow()
        where = f"/v1/flows/{flow_id}"
        body = {"flow_id": flow_id, "flow_kind": f"kind-{self.secret}", "namespace": self.namespace}
        await self.send_request("POST", "/v1/flows", body)
        members = {role: await self.create() for role in ("source", "target", "other", "sink")}
        for member in members.values():
            await self.send_request("POST", f"{where}/members", {"flow_id": flow_id, "execution_id": member})
        edges = {}
        for role in ("target", "sink"):
            edge = {
                "flow_id": flow_id,
                "edge_id": str(uuid.uuid4()),
                "upstream_execution_id": members["source"],
                "downstream_execution_id": members[role],
                "data_passing_ref": self.secret,
            }
            edges[role] = edge["edge_id"]
            await self.send_request("POST", f"{where}/edges", edge)
            if role == "target":
                await self.send_request("POST", f"{where}/edges/apply", edge)
        return {"flow": flow_id, "edge": edges["sink"], "spare": await self.create(), **members}

    async def _registry(self) -> dict[str, str]:
        instance = f"i-{self.namespace}"
        body = {
            "worker_instance_id": instance,
            "namespace": self.namespace,
            "lanes": [f"lane-{self.secret}"],
            "liveness_ttl_ms": HOUR_MS,
            "capabilities": [f"cap-{self.secret}"],
        }
        await self.send_request("POST", "/v1/workers/w/register", body)
        token = {"name": self.secret, "scopes": ["read"], "namespaces": [self.namespace]}
        return {
            "instance": instance,
            "api_token": (await self.send_request("POST", "/v1/admin/tokens", token))["token_id"],
        }

    async def _last(self) -> str:
        made = await self.create(lane_id=f"last-{self.secret}")
        await self.send_request("PUT", f"/v1/executions/{segment(made)}/priority", {"new_priority": 3})
        claim_body = {"worker_instance_id": f"i-{self.secret}", "lanes": [f"last-{self.secret}"]}
        [work] = (await self.send_request("POST", f"/v1/workers/w-{self.secret}/claims", claim_body))["claimed"]
        point = await self.call_lease("waitpoints", work["handle"], waitpoint_key="k", expires_in_ms=HOUR_MS)
        await self.signal(made, point["waitpoint_id"], point["token"])
        await self.call_lease("complete", work["handle"], result=self.octets)
        return made


async def unknown_tenant(app: App, like: Tenant) -> Tenant:
    """Return a tenant with ids of the same form, of which no row exists."""
    fields = {name: UUID.sub(lambda _: str(uuid.uuid4()), text) for name, text in msgspec.structs.asdict(like).items()}
    known = await app.handle_signer.verify(like.handle)
    away = msgspec.structs.replace(known.fields, execution_id=fields["active"])
    handle = await app.handle_signer.sign(Handle.mint(known.backend, HandleKind.FRESH, away))
    names = {"namespace": "nowhere", "secret": "nothing", "instance": "i-nowhere", "flow": flow(), "handle": handle}
    return Tenant(**(fields | names | {"link": like.link[:-4] + "0000"}))
