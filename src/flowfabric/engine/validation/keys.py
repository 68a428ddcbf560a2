"""Argument checks of submits with a key."""

from __future__ import annotations

from flowfabric import errors
from flowfabric.engine.validation import execution as validate
from flowfabric.model.execution import KeyUntil
from flowfabric.rules import validation
from flowfabric.rules.durable.keys import KeyMode, KeyPolicy
from flowfabric.rules.durable.mailbox import MAX_UNREAD

_UNTIL_STARTED = (KeyMode.DEBOUNCE, KeyMode.BATCH)


def validate_key_policy(policy: object) -> KeyPolicy:
    """Check a key policy."""
    policy = validate.check_type("policy", policy, KeyPolicy)
    try:
        mode, until = KeyMode(policy.mode), KeyUntil(policy.until)
    except ValueError:
        raise errors.InvalidInput(
            f"policy: mode is one of {', '.join(KeyMode)}, and until one of {', '.join(KeyUntil)}"
        ) from None
    if (mode in _UNTIL_STARTED) is not (until is KeyUntil.STARTED):
        raise errors.InvalidInput(f"until: {until} does not go with the mode {mode}")
    most = validation.integer("most", policy.most, least=1 if mode is KeyMode.BATCH else 0, most=MAX_UNREAD)
    return KeyPolicy(
        mode=mode,
        until=until,
        ttl_ms=None if policy.ttl_ms is None else validation.duration_ms("ttl_ms", policy.ttl_ms),
        wait_ms=validation.duration_ms("wait_ms", policy.wait_ms, least=1 if mode in _UNTIL_STARTED else 0),
        latest_ms=validate.optional_duration("latest_ms", policy.latest_ms),
        most=most,
    )
