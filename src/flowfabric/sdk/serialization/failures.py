"""Encodes exceptions as JSON, and makes them again: the same class, text and fields in every process.

    {"type": "shop.Declined", "text": "card 4242", "data": {"args": ["card 4242"], "fields": {"code": 7}}}

The class is found by module and name among the modules that are loaded; nothing is imported. The exception is made
without calling its `__init__`. Arguments and fields are kept if they have a JSON form; others are dropped and named in
a note. If the text would come out differently, a subclass returns the stored one. A class that cannot be made (a local
one, an exception group) becomes `StepFailed`. Encoding and decoding never fail, whatever an exception does in
`__str__` or contains.
"""

from __future__ import annotations

import builtins
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from functools import lru_cache
from itertools import islice
from typing import Any

import msgspec

from flowfabric.model.failure import MAX_FAILURE_BYTES, StoredFailure, encode_stored, read_failure
from flowfabric.sdk.exceptions import StepFailed

MAX_TYPE_CHARS = 500
MAX_MEMBERS = 10  # members of an exception group whose texts are kept
MAX_DEPTH = 50  # nesting of lists and objects in a field
MIN_INT, MAX_INT = -(2**63), 2**64 - 1  # what the JSON encoder takes
HEAP_TYPE_FLAG = 1 << 9  # set for classes that are made at run time, unlike those of the interpreter

_ARGS = BaseException.__dict__["args"]
_DICT = BaseException.__dict__["__dict__"]
_KEPT_TEXT = "_flowfabric_kept_text"
_NOTES = "__notes__"


class FailureData(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is kept of an exception beside its class and text. A dropped argument is None in `args`."""

    args: list[Any] = []
    fields: dict[str, Any] = {}
    notes: list[str] = []
    dropped: list[str] = []


# -- encode ------------------------------------------------------------------------------------------------------------


def encode_failure(failure: BaseException, category: str | None = None) -> bytes:
    """Encode an exception in at most 16 KiB of JSON. A larger one is cut down to its class and text."""
    return _encode_bounded(_describe(failure, _Plain(), category))


def remember_failure(failure: Exception) -> tuple[bytes, Exception]:
    """Encode an exception; also return what to raise: the exception itself, unless decoding gives something else."""
    plain = _Plain()
    data = _encode_bounded(_describe(failure, plain))
    stored = read_failure(data)
    made = _make_or_replace(stored)
    is_same = plain.is_exact and stored.data is not None and type(made) is type(failure)
    return data, failure if is_same else made


def _describe(failure: BaseException, plain: _Plain, category: str | None = None) -> StoredFailure:
    text = _clean(_text(failure))
    try:
        if type(failure) is StepFailed:  # in place of an exception that could not be made
            return StoredFailure(_clean(failure.type)[:MAX_TYPE_CHARS], _clean(failure.text), category, {})
        name = _clean(type_name(type(failure)))[:MAX_TYPE_CHARS]
        data = _data(failure, plain)
        return StoredFailure(name, text, category, None if data is None else msgspec.to_builtins(data))
    except Exception:  # a class that hides its name or its fields
        plain.is_exact = False
        return StoredFailure("Exception", text, category)


def type_name(cls: type) -> str:
    """Return module and name of a class; a built-in class has its name only."""
    module, name = cls.__module__, cls.__qualname__
    return name if module == "builtins" else f"{module}.{name}"


def _text(failure: BaseException) -> str:
    """Return the text of an exception, and for a group those of its first members; a very long text is cut."""
    text = _own_text(failure)
    if _is_group(failure):
        members = islice(group_leaves(failure), MAX_MEMBERS)
        text = f"{text}: {'; '.join(f'{type(member).__name__}: {_own_text(member)}' for member in members)}"
    return text[:MAX_FAILURE_BYTES]


def _own_text(failure: BaseException) -> str:
    try:
        return str.__str__(str(failure))[:MAX_FAILURE_BYTES]
    except BaseException as error:  # whatever a hostile `__str__` raises
        return f"(its text cannot be made: {type(error).__name__})"


def group_leaves(raised: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions in a group and its nested groups; for any other exception itself."""
    pending: list[BaseException] = [raised]
    while pending:
        failure = pending.pop()
        if _is_group(failure):
            pending.extend(reversed(BaseExceptionGroup.exceptions.__get__(failure)))
        else:
            yield failure


def _is_group(failure: BaseException) -> bool:
    return issubclass(type(failure), BaseExceptionGroup)  # `isinstance` may ask the exception itself


def _clean(text: str) -> str:
    """Replace lone surrogates, which have no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def _data(failure: BaseException, plain: _Plain) -> FailureData | None:
    args: list[Any] = []
    fields: dict[str, Any] = {}
    notes: list[str] = []
    dropped: list[str] = []
    try:
        for number, value in enumerate(_ARGS.__get__(failure)):
            try:
                args.append(plain.convert(value))
            except _TooLarge:
                raise
            except Exception:
                args.append(None)
                dropped.append(f"args[{number}]")
        for name, value in _fields(failure):
            key = "a field without a name"
            try:
                key = plain.convert_key(name)
                converted = plain.convert(value)
            except _TooLarge:
                raise
            except Exception:
                dropped.append("notes" if key == _NOTES else key)
                continue
            if key != _NOTES:
                fields[key] = converted
            elif isinstance(converted, list) and all(isinstance(note, str) for note in converted):
                notes = converted
            else:
                dropped.append("notes")
    except _TooLarge:
        plain.is_exact = False
        return None
    plain.is_exact = plain.is_exact and not dropped
    return FailureData(args, fields, notes, dropped)


def _fields(failure: BaseException) -> Iterator[tuple[Any, Any]]:
    """Yield names and values of the fields of an exception, those of slots and of the interpreter's classes too."""
    cls: type = type(failure)
    for name, (base, descriptor) in _members(cls).items():
        try:
            value = descriptor.__get__(failure)
        except AttributeError:
            continue
        if value is not None or _is_heap_type(base):
            yield name, value
    yield from _DICT.__get__(failure).items()


@lru_cache(maxsize=1000)
def _members(cls: type) -> dict[str, tuple[type, Any]]:
    """Return the descriptors of the fields that are not in an exception's `__dict__`, with their classes."""
    members: dict[str, tuple[type, Any]] = {}
    for base in type.mro(cls):
        for name, descriptor in vars(base).items():
            is_field = inspect.ismemberdescriptor(descriptor) or inspect.isgetsetdescriptor(descriptor)
            if is_field and name not in ("args", _KEPT_TEXT) and not name.startswith("__"):
                members.setdefault(name, (base, descriptor))
    return members


def _is_heap_type(cls: type) -> bool:
    return bool(cls.__flags__ & HEAP_TYPE_FLAG)


class _NotPlain(Exception):
    """A value has no JSON form."""


class _TooLarge(Exception):
    """The values are larger than what is kept of a failure."""


class _Plain:
    """Converts values to plain data, within a limit for all of them together."""

    def __init__(self) -> None:
        self._left = MAX_FAILURE_BYTES
        self.is_exact = True  # no value was changed by its conversion

    def convert(self, value: Any, depth: int = 0) -> Any:
        """Return a value as plain data. Tuples become lists, members of a str or int enum their values."""
        kind = type(value)
        if kind is str:
            return self._convert_text(value)
        self._count(2)
        if value is None or kind is bool:
            return value
        if kind is int and MIN_INT <= value <= MAX_INT:
            return value
        if kind is float and math.isfinite(value):
            return value
        if depth < MAX_DEPTH:
            if kind is list:
                return [self.convert(item, depth + 1) for item in value]
            if kind is dict:
                return {self.convert_key(key): self.convert(item, depth + 1) for key, item in value.items()}
            if kind is tuple:
                self.is_exact = False
                return [self.convert(item, depth + 1) for item in value]
            if issubclass(kind, Enum) and issubclass(kind, str | int):
                self.is_exact = False
                return self.convert(str.__str__(value) if issubclass(kind, str) else int.__int__(value), MAX_DEPTH)
        raise _NotPlain

    def convert_key(self, key: Any) -> str:
        if type(key) is not str:
            raise _NotPlain
        return self._convert_text(key)

    def _convert_text(self, text: str) -> str:
        self._count(len(text) + 2)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _NotPlain from None
        return text

    def _count(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise _TooLarge


def _encode_bounded(stored: StoredFailure) -> bytes:
    data = encode_stored(stored)
    if len(data) <= MAX_FAILURE_BYTES:
        return data
    text = stored.text
    while len(data) > MAX_FAILURE_BYTES:  # a character takes 1 to 6 bytes, so it may be cut several times
        data = encode_stored(StoredFailure(stored.type, text, stored.category))
        if len(data) > MAX_FAILURE_BYTES:
            text = text[: max(0, len(text) * MAX_FAILURE_BYTES // len(data) - 100)]
    return data


# -- decode ------------------------------------------------------------------------------------------------------------


def decode_failure(data: bytes) -> Exception:
    """Make the exception that was encoded, or `StepFailed` if its class cannot be made in this process."""
    return _make_or_replace(read_failure(data))


def _make_or_replace(stored: StoredFailure) -> Exception:
    made = make_exception(stored)
    if made is None:
        made = StepFailed(stored.type, stored.text)
        data = _read_data(stored)
        _add_notes(made, [] if data is None else data.notes)
    return made


def _read_data(stored: StoredFailure) -> FailureData | None:
    """Return what was kept; None if nothing was, or if the failure is of another origin."""
    try:
        return None if stored.data is None else msgspec.convert(stored.data, FailureData)
    except msgspec.ValidationError:
        return None


def make_exception(stored: StoredFailure) -> Exception | None:
    """Make an exception as it was stored; None if its class is not loaded or cannot be made."""
    cls = _find_class(stored.type)
    if cls is None:
        return None
    try:
        made = _make(cls, stored)
        if _clean(_text(made)) == stored.text:
            return made
        made = _make(_class_with_text(cls), stored)
        getattr(type(made), _KEPT_TEXT).__set__(made, stored.text)
        return made if _text(made) == stored.text else None
    except Exception:
        return None


def _find_class(name: str) -> type | None:
    """Return an exception class by module and name, if it is loaded."""
    parts = name.split(".")
    for split in range(len(parts) - 1, -1, -1):
        module = sys.modules.get(".".join(parts[:split])) if split else builtins
        found: Any = module
        try:
            for part in parts[split:]:
                found = vars(found)[part]  # no `getattr`: a module may import what it is asked for
            if isinstance(found, type) and issubclass(found, Exception):
                return found
        except Exception:
            continue
    return None


def _make(cls: type, stored: StoredFailure) -> Exception:
    """Make an exception by the `__new__` of the interpreter's class below it, and set its fields."""
    base = next(base for base in type.mro(cls) if not _is_heap_type(base) and "__new__" in vars(base))
    new: Callable[[type], Exception] = vars(base)["__new__"]
    made, members = new(cls), _members(cls)
    if type(made) is not cls:
        raise TypeError(f"{cls!r} makes something else")
    data = _read_data(stored)
    if data is None:
        _ARGS.__set__(made, (stored.text,))
        hint = f"its arguments and fields were not kept: they have more than {MAX_FAILURE_BYTES // 1024} KiB"
        _add_notes(made, [f"{hint}; put what you need into short fields"])
        return made
    _ARGS.__set__(made, tuple(data.args))
    for name, value in data.fields.items():
        if name in members:
            members[name][1].__set__(made, value)
        else:
            _DICT.__get__(made)[name] = value
    _add_notes(made, data.notes)
    if data.dropped:
        names = ", ".join(f"'{name}'" for name in data.dropped)
        verb = "was" if len(data.dropped) == 1 else "were"
        _add_notes(made, [f"its {names} {verb} not kept; put what you need into plain fields"])
    return made


def _add_notes(made: Exception, notes: list[str]) -> None:
    if notes:
        _DICT.__get__(made).setdefault(_NOTES, []).extend(notes)


@lru_cache(maxsize=1000)
def _class_with_text(cls: type) -> type:
    """Return a subclass, under the same name, whose text is the one that was stored."""

    def stored_text(self: Exception) -> str:
        return str(getattr(type(self), _KEPT_TEXT).__get__(self))

    namespace: dict[str, object] = {
        "__slots__": (_KEPT_TEXT,),
        "__str__": stored_text,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    metaclass: Callable[[str, tuple[type, ...], dict[str, object]], type] = type(cls)
    return metaclass(cls.__name__, (cls,), namespace)
