"""`Key`: a key names a run. What a task's key is, how long a run has it, and what a submit does meanwhile.

@app.task(key=Key("order_id"))                            # idempotent: the same order is the same run
@app.task(key=Key.single("tenant"))                       # one at a time
@app.task(key=Key.latest("document"))                     # a new submit takes the place of the one under way
@app.task(key=Key.debounce("user", "5s", latest="1m"))    # starts 5 s after the last submit, with its input
@app.task(key=Key.batch("tenant", most=100, within="2s")) # one run for many submits, each with its own result
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from flowfabric.engine.types import KeyMode, KeyPolicy, KeyUntil
from flowfabric.errors import FabricError, InvalidInput
from flowfabric.sdk import validation
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.limits import ScopeSelector, resolve_scope
from flowfabric.sdk.serialization.values import Signature

MAX_BATCH = 10_000
MAX_KEY_CHARS = 500
_WITHOUT_FIELDS = (str, int, float, bool, bytes, types.NoneType)


class RunKey:
    """What names a task's runs: a function of the arguments, and what a submit does whose key is taken."""

    def __init__(self, of: ScopeSelector, policy: KeyPolicy) -> None:
        self.of = _validate_selector(of)
        self.policy = policy

    def check(self, task: str, signature: Signature) -> None:
        """Refuse a key that no call of this task could have."""
        if callable(self.of) or self.of in signature.parameter_codecs:
            return
        codecs = signature.parameter_codecs.values()
        if all(codec.annotation in _WITHOUT_FIELDS for codec in codecs):
            known = ", ".join(signature.parameter_codecs) or "none"
            raise InvalidInput(f"key of {task}: it has no parameter {self.of!r}; its parameters: {known}")

    def resolve(self, task: str, arguments: Mapping[str, Any], tags: Mapping[str, str]) -> str:
        """Return the key of a call with these arguments."""
        subject = f"key of {task}"
        try:
            text = resolve_scope(self.of, subject, arguments, tags)
        except FabricError:
            raise
        except Exception as error:
            raise InvalidInput(
                f"{subject}: its function raised {type(error).__name__}: {error}; nothing was submitted. Let it return "
                "a text for every input that its task accepts"
            ) from error
        return validate_key(text, subject)


class Key(RunKey):
    """The key of a task's runs, as a function of its arguments: a run has it as long as it is kept, a day at least.

    `of` names a parameter or a field of an argument, or is a function of the arguments. With `ttl` the key is taken for
    that time after a submit, whatever becomes of the run: at most one run in that time, and other submits return it.
    """

    def __init__(self, of: ScopeSelector, *, ttl: Duration | None = None) -> None:
        super().__init__(of, KeyPolicy(ttl_ms=None if ttl is None else to_ms(ttl, "ttl", minimum_ms=1)))

    @classmethod
    def single(cls, of: ScopeSelector, *, taken: Literal["return", "refuse"] = "return") -> Key:
        """One run at a time: until it has ended, a submit returns it, or with `taken="refuse"` raises `KeyTaken`."""
        if taken not in ("return", "refuse"):
            raise InvalidInput(f'taken: {taken!r} is neither "return" nor "refuse"')
        return cls._of(of, KeyPolicy(mode=KeyMode(taken), until=KeyUntil.ENDED))

    @classmethod
    def latest(cls, of: ScopeSelector) -> Key:
        """One run at a time: a submit cancels the one that has not ended, and takes its place."""
        return cls._of(of, KeyPolicy(mode=KeyMode.LATEST, until=KeyUntil.ENDED))

    @classmethod
    def debounce(cls, of: ScopeSelector, after: Duration, *, latest: Duration | None = None) -> Key:
        """One run for many submits: it starts `after` the last one, `latest` after the first at most.

        Each submit replaces its input. Once it has started, a submit creates the next run.
        """
        wait_ms = to_ms(after, "after", minimum_ms=1)
        latest_ms = None if latest is None else to_ms(latest, "latest", minimum_ms=1)
        if latest_ms is not None and latest_ms < wait_ms:
            raise InvalidInput(f"latest: {latest!r} is less than {after!r}, after which the run starts anyway")
        return cls._of(
            of, KeyPolicy(mode=KeyMode.DEBOUNCE, until=KeyUntil.STARTED, wait_ms=wait_ms, latest_ms=latest_ms)
        )

    @staticmethod
    def batch(of: ScopeSelector, *, most: int, within: Duration) -> BatchKey:
        """One run for many submits: it starts `within` a time of the first, or at once with the `most`-th.

        The handler takes a list and returns a list; each submit's run has its own result.
        """
        count = validation.validate_int("most", most, minimum=1)
        if count > MAX_BATCH:
            raise InvalidInput(f"most: {count} inputs are more than a batch may have, which is {MAX_BATCH:,}")
        wait_ms = to_ms(within, "within", minimum_ms=1)
        return BatchKey(of, KeyPolicy(mode=KeyMode.BATCH, until=KeyUntil.STARTED, wait_ms=wait_ms, most=count))

    @classmethod
    def _of(cls, of: ScopeSelector, policy: KeyPolicy) -> Key:
        key = cls(of)
        key.policy = policy
        return key


class BatchKey(RunKey):
    """The key of a task whose handler takes and returns a list."""


def validate_key(value: object, subject: str = "key") -> str:
    """Return a key, or raise `InvalidInput`."""
    if not isinstance(value, str) or not value:
        raise InvalidInput(f'{subject}: {value!r} is not a text that identifies one piece of work, such as "order-7"')
    if len(value) > MAX_KEY_CHARS:
        raise InvalidInput(f"{subject}: {len(value)} characters, the limit is {MAX_KEY_CHARS}; hash what is longer")
    return value


def item_signature(handler: Callable[..., Any], signature: Signature, context: type) -> Signature:
    """Return the signature of the submits of a batch: one item in, one result out."""
    name = handler.__qualname__
    hint = f"Key.batch of {name}: write async def {handler.__name__}(items: list[T]) -> list[R]"
    if len(signature.parameter_codecs) != 1:
        raise InvalidInput(f"{hint}; it has the parameters {', '.join(signature.parameter_codecs) or 'none'}")
    [(parameter, codec)] = signature.parameter_codecs.items()
    taken, given = _element(codec.annotation), _element(signature.result_codec.annotation)
    if taken is None or given is None:
        wrong = f"{parameter} is no list" if taken is None else "its result is no list"
        raise InvalidInput(f"{hint}; {wrong}")

    def item() -> None:
        """Carry the annotations of one item."""

    item.__qualname__ = name
    item.__annotations__ = {parameter: taken, "return": given}
    positional = inspect.Parameter(parameter, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=taken)
    item.__signature__ = inspect.Signature([positional], return_annotation=given)  # type: ignore[attr-defined]
    return Signature(item, context)


def _element(annotation: Any) -> Any:
    """Return the type of a list's elements; None if it is no list."""
    if annotation is list:
        return Any
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is list else None


def _validate_selector(of: object) -> ScopeSelector:
    if (isinstance(of, str) and of) or callable(of):
        return of
    raise InvalidInput(f"key: {of!r} is neither the name of a parameter nor a function of the arguments")
