"""Error replies of the server: what each means for the command, and the error of the store port it becomes.

| reply or event | executed? | what follows |
|---|---|---|
| MOVED, ASK | no | the command follows to the named node |
| TRYAGAIN, CLUSTERDOWN, LOADING, BUSY, NOREPLICAS, READONLY, MASTERDOWN | no | sent again until its deadline |
| "Function not found" | no | the library is loaded there, then sent again |
| OOM, MISCONF, NOAUTH, WRONGPASS, NOPERM, DENIED | no | `StoreUnavailable`, not in doubt |
| a code that begins with FF | no | the `ReplyError` itself: our functions refuse before they write |
| the connection was refused, or lost before the bytes left | no | sent again on a cluster, else not in doubt |
| the connection was lost after the bytes left, or a timeout | unknown | in doubt; a read is sent again |
| WAIT or WAITAOF reported fewer copies than asked | may vanish | `StoreUnavailable`, in doubt |
| any other error, or one from inside a function | perhaps in part | `Corruption` |
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from flowfabric.errors import Corruption, FabricError, StoreFault, StoreUnavailable
from flowfabric.handles import BackendTag

BACKEND_FACTS: dict[str, Any] = {"backend": BackendTag.VALKEY.title}
REFUSAL_PREFIX = "FF"  # begins the codes with which our functions refuse a call before they write


class ReplyError(Exception):
    """An error reply of the server; `code` is its first word."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.code = text.partition(" ")[0]


class Remedy(Enum):
    """What the client does after an error reply to a command that was not executed."""

    FOLLOW = 1  # send it to the node that the reply names
    RETRY = 2  # send it again after a backoff
    REROUTE = 3  # ask for the slot map, then send it again
    LOAD_LIBRARY = 4  # load the functions on that node, then send it again
    REFUSE = 5  # report the error


_BY_CODE: dict[str, tuple[Remedy, StoreFault]] = {
    "MOVED": (Remedy.FOLLOW, StoreFault.CLUSTER),
    "ASK": (Remedy.FOLLOW, StoreFault.CLUSTER),
    "TRYAGAIN": (Remedy.RETRY, StoreFault.CLUSTER),
    "CLUSTERDOWN": (Remedy.REROUTE, StoreFault.CLUSTER),
    "READONLY": (Remedy.REROUTE, StoreFault.CLUSTER),
    "MASTERDOWN": (Remedy.REROUTE, StoreFault.CLUSTER),
    "LOADING": (Remedy.RETRY, StoreFault.BUSY_LOADING),
    "BUSY": (Remedy.RETRY, StoreFault.BUSY_LOADING),
    "NOREPLICAS": (Remedy.RETRY, StoreFault.CLUSTER),
    "OOM": (Remedy.REFUSE, StoreFault.TRANSPORT),
    "MISCONF": (Remedy.REFUSE, StoreFault.TRANSPORT),
    "NOAUTH": (Remedy.REFUSE, StoreFault.AUTH),
    "WRONGPASS": (Remedy.REFUSE, StoreFault.AUTH),
    "NOPERM": (Remedy.REFUSE, StoreFault.AUTH),
    "DENIED": (Remedy.REFUSE, StoreFault.AUTH),
}
_FUNCTION_MISSING = "ERR Function not found"
_INSIDE_FUNCTION = ("@user_function", "@user_script")  # the server adds the place where a function raised


def remedy_for(error: ReplyError) -> Remedy:
    """Return what to do after an error reply."""
    if error.text.startswith(_FUNCTION_MISSING):
        return Remedy.LOAD_LIBRARY
    if _was_raised_inside(error):
        return Remedy.REFUSE
    remedy, _ = _BY_CODE.get(error.code, (Remedy.REFUSE, StoreFault.OTHER))
    return remedy


def translate_reply(error: ReplyError) -> FabricError | ReplyError:
    """Return the error of the store port for an error reply that ends a command."""
    if error.text.startswith(_FUNCTION_MISSING):
        return unavailable(error.text, StoreFault.SCRIPT_NOT_LOADED)
    if not _was_raised_inside(error):
        if error.code.startswith(REFUSAL_PREFIX):
            return error
        if error.code in _BY_CODE:
            return unavailable(error.text, _BY_CODE[error.code][1])
    return Corruption(f"Valkey: {error.text}")


def unavailable(detail: str, source: StoreFault, *, in_doubt: bool = False) -> StoreUnavailable:
    """Return `StoreUnavailable` with the facts of this store."""
    return StoreUnavailable(detail, **BACKEND_FACTS, source=source, in_doubt=in_doubt)


def _was_raised_inside(error: ReplyError) -> bool:
    return any(place in error.text for place in _INSIDE_FUNCTION)
