"""All errors of FlowFabric, one page per family.

    FabricError
    ├── NotFound                the named thing does not exist
    ├── ValidationError         the request itself is wrong; a retry is refused again
    ├── ContentionError         the moment is wrong; a retry may succeed
    ├── ConflictError           the request contradicts stored data
    ├── StateError              the current state forbids this, or makes it unnecessary
    ├── BugError                this should not have been possible
    ├── StoreUnavailable        the store did not answer properly              (family: transport)
    ├── Unavailable             an operation cannot be served now
    │   ├── SchemaTooNew
    │   ├── PartitionMismatch
    │   └── ForkedProcess
    ├── ResourceExhausted       a bounded pool is full
    │   └── WorkerAtCapacity
    ├── OperationTimeout        an operation exceeded its time limit          (family: timeout)
    ├── StreamDisconnected      a subscription ended; its cursor resumes it
    └── StreamBackpressure      a subscription lost old events; it continues

Below each family there is one class per `kind`, the code that is used on the wire: `StaleLease` is `stale_lease`. A
family names its own. The first line of a class's docstring is the sentence that a person reads. Every error takes an
optional positional `detail` and keyword facts, which become attributes:

    InvalidInput("lane_id: empty")
    StaleLease(execution_id=execution_id, lease_epoch=3)

The message is the code, the detail, the sentence, and those facts that a person can look up. A class whose sentence
adds nothing to a detail sets `explained_by_detail`.

Two errors are equal if type, kind, detail and facts are, and every error can be pickled. Context from a call site is
added as a note (`add_note`), so that it never changes what an error is or how it is classified.
"""

from __future__ import annotations

from typing import TypeAlias

from flowfabric.errors.base import *  # noqa: F403
from flowfabric.errors.base import FabricError, NotFound
from flowfabric.errors.conflict import *  # noqa: F403
from flowfabric.errors.contention import *  # noqa: F403
from flowfabric.errors.faults import *  # noqa: F403
from flowfabric.errors.state import *  # noqa: F403
from flowfabric.errors.validation import *  # noqa: F403

ENTITIES = (
    "execution",
    "flow",
    "attempt",
    "budget",
    "quota_policy",
    "stream",
    "waitpoint",
    "suspension",
    "operation",
    "schedule",
    "reply",
)

ByKind: TypeAlias = dict[str, type[FabricError]]


def _kinds_below(cls: type[FabricError]) -> ByKind:
    kinds: ByKind = {}
    for subclass in cls.__subclasses__():
        kinds[subclass.kind] = subclass
        kinds.update(_kinds_below(subclass))
    return kinds


by_kind: ByKind = {f"{entity}_not_found": NotFound for entity in ENTITIES} | _kinds_below(FabricError)
"""The class of every code. `waitpoint_not_found` is the contention kind; `NotFound("waitpoint")` shares its code."""
