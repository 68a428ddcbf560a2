"""Exceptions as JSON and back: the same class, text and fields, and no exception that cannot be encoded."""

from __future__ import annotations

import asyncio
import builtins
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from enum import IntEnum, StrEnum
from types import ModuleType
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric import BudgetExceeded, Fatal, RetryAfter, StepFailed, errors
from flowfabric.model.failure import MAX_FAILURE_BYTES, read_failure
from flowfabric.sdk.serialization.failures import decode_failure, encode_failure, remember_failure

# -- classes that programs define ----------------------------------------------------------------------------------


class Plain(Exception):
    pass


class Declined(Exception):
    def __init__(self, card: str, *, code: int) -> None:
        super().__init__(f"card {card} was declined")
        self.card = card
        self.code = code


class StatusError(Exception):
    def __init__(self, text: str, *, request: object, response: object) -> None:
        super().__init__(text)
        self.request = request
        self.response = response


class Slotted(Exception):
    __slots__ = ("code", "unset")

    def __init__(self, code: Any) -> None:
        super().__init__()
        self.code = code

    def __str__(self) -> str:
        return f"slot {self.code!r}"


class TextFromFields(Exception):
    def __init__(self, number: Any) -> None:
        self.number = number

    def __str__(self) -> str:
        return f"number {self.number}"


class RefusesNew(Exception):
    def __new__(cls, *args: Any) -> RefusesNew:
        if not args:
            raise TypeError("needs arguments")
        return super().__new__(cls, *args)


class SetsNothing(Exception):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        vars(self).update(code=1)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("frozen")


class Frozen(SetsNothing):
    def __init_subclass__(cls) -> None:
        raise TypeError("no subclasses")


class Reads(Exception):
    @property
    def status(self) -> int:
        return int(self.args[0])


class Multiple(Declined, ValueError, KeyError):
    pass


class Outer:
    class Inner(ValueError):
        pass


class Code(StrEnum):
    LOST = "lost"


class Level(IntEnum):
    HIGH = 3


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Endless(Exception):
    def __str__(self) -> str:
        return str(self)


class Leaves(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class WrongText(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class HostileReduce(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("no pickles")

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class HostileMeta(type):
    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class HostileValue:
    __hash__ = None  # type: ignore[assignment]

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError("no class")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")


BUILTINS = [
    cls
    for cls in vars(builtins).values()
    if inspect.isclass(cls) and issubclass(cls, Exception) and not issubclass(cls, BaseExceptionGroup | UnicodeError)
]
# None of these has a Python `__init__` with parameters of its own: they take any arguments.
ANY_ARGUMENTS = [Plain, Reads, Outer.Inner, SetsNothing, Fatal, json.JSONDecodeError.__base__, *BUILTINS]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    # no lone surrogates
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
odd_values = st.sampled_from((Code.LOST, Level.HIGH, ValueError("inside"), Declined, print)) | st.sampled_from(
    (b"bytes", (1, 2), {1, 2}, object(), float("nan"), float("inf"), 2**70, "\ud800", {1: 2}, {"\udfff": 1}, 1j)
)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: not name.startswith("__")
)


def make(cls: type[BaseException], args: list[Any]) -> BaseException:
    """Call a class with as many of the arguments as it takes."""
    for count in range(len(args), -1, -1):
        try:
            return cls(*args[:count])
        except Exception:
            continue
    return Plain(*args)


def fields_of(failure: BaseException) -> dict[str, Any]:
    """Return the fields of an exception, as a reader sees them."""
    fields = {name: value for name, value in vars(failure).items() if name != "__notes__"}
    for name in ("errno", "strerror", "filename", "msg", "lineno", "name", "path", "value", "code", "unset"):
        if inspect.ismemberdescriptor(inspect.getattr_static(type(failure), name, None)):
            fields[name] = getattr(failure, name, "unset")
    return fields


def everything(failure: BaseException) -> tuple[Any, ...]:
    """Return all that a caller can observe of an exception."""
    return type(failure), str(failure), failure.args, fields_of(failure), getattr(failure, "__notes__", [])


# -- what is kept --------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(ANY_ARGUMENTS),
    st.lists(json_values, max_size=4),
    st.dictionaries(names, json_values, max_size=3),
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=2),
)
def test_an_exception_of_plain_data_comes_back_with_type_text_fields_and_notes(
    cls: type[BaseException], args: list[Any], fields: dict[str, Any], notes: list[str]
) -> None:
    failure = make(cls, args)
    vars(failure).update(fields)
    if notes:
        vars(failure)["__notes__"] = notes
    data = encode_failure(failure)
    first, second = decode_failure(data), decode_failure(data)
    assert everything(first) == everything(second)
    assert isinstance(first, type(failure))
    assert everything(first)[1:] == everything(failure)[1:]
    assert encode_failure(first) == data


@given(
    st.sampled_from(ANY_ARGUMENTS),
    st.lists(json_values | odd_values, max_size=4),
    st.dictionaries(names, json_values | odd_values, max_size=3),
)
def test_a_first_run_raises_what_a_later_one_raises(
    cls: type[Exception], args: list[Any], fields: dict[str, Any]
) -> None:
    failure = make(cls, args)
    vars(failure).update(fields)
    assert isinstance(failure, Exception)
    data, raised = remember_failure(failure)
    later = decode_failure(data)
    assert everything(raised) == everything(later)
    assert isinstance(later, type(failure))
    kept = {name for name, value in fields_of(later).items() if value is not None}
    assert kept <= fields_of(failure).keys()
    named = " ".join(getattr(later, "__notes__", []))
    for name in fields_of(failure).keys() - kept:
        assert fields_of(failure)[name] is None or f"'{name}'" in named


@pytest.mark.parametrize(
    "failure",
    [
        Plain("no"),
        Declined("4242", code=7),
        TextFromFields(3),
        Multiple("1", code=1),
        Outer.Inner("x", 2),
        Slotted({"a": [1, None]}),
        RefusesNew("argument"),
        SetsNothing("text", 2),
        FileNotFoundError(2, "No such file", "/tmp/x"),
        KeyError("name"),
        StopIteration(4),
        RetryAfter("5s"),
        Fatal("no"),
        BudgetExceeded("b", "tokens", used=3, limit=4, asked=5),
        errors.NotFound("execution"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_the_very_object_is_raised_if_nothing_is_lost(failure: Exception) -> None:
    data, raised = remember_failure(failure)
    assert raised is failure
    later = decode_failure(data)
    assert type(later) is type(failure)
    assert everything(later) == everything(failure)


def test_a_field_that_is_not_json_is_dropped_and_named_in_a_note() -> None:
    raised = decode_failure(encode_failure(StatusError("402 declined", request=object(), response=b"")))
    assert isinstance(raised, StatusError)
    assert str(raised) == "402 declined"
    assert raised.__notes__ == ["its 'request', 'response' were not kept; put what you need into plain fields"]


def test_an_argument_that_is_not_json_leaves_its_place_empty() -> None:
    raised = decode_failure(encode_failure(Plain("first", object, 3)))
    assert raised.args == ("first", None, 3)
    assert str(raised) == str(("first", object, 3))
    assert raised.__notes__ == ["its 'args[1]' was not kept; put what you need into plain fields"]


def test_a_text_that_would_come_out_differently_is_kept() -> None:
    with pytest.raises(UnicodeDecodeError) as caught:
        b"\xff".decode()
    raised = decode_failure(encode_failure(caught.value))
    assert isinstance(raised, UnicodeDecodeError)
    assert str(raised) == str(caught.value)
    assert type(raised).__name__ == "UnicodeDecodeError"
    assert (raised.reason, raised.start) == ("invalid start byte", 0)
    assert encode_failure(decode_failure(encode_failure(raised))) == encode_failure(raised)


def test_tuples_and_enums_come_back_as_their_json_form_in_the_first_run_too() -> None:
    failure = Plain("x")
    vars(failure).update(codes=(1, 2), reason=Code.LOST, level=Level.HIGH)
    _, raised = remember_failure(failure)
    assert raised is not failure
    assert vars(raised) == {"codes": [1, 2], "reason": "lost", "level": 3}


# -- classes that cannot be made -----------------------------------------------------------------------------------


def _local() -> Exception:
    class Local(Exception):
        pass

    return Local("here")


def _of_pydantic() -> Exception:
    try:
        pydantic.TypeAdapter(int).validate_python("x")
    except pydantic.ValidationError as failure:
        return failure
    raise AssertionError


def _frozen() -> Exception:
    failure = Frozen(object())
    vars(failure)["__notes__"] = ["note"]
    return failure


@pytest.mark.parametrize(
    ("failure", "name"),
    [
        (_local(), f"{__name__}._local.<locals>.Local"),
        (_of_pydantic(), "pydantic_core._pydantic_core.ValidationError"),
        (ExceptionGroup("both", [Plain("a"), Plain("b")]), "ExceptionGroup"),
        (SystemExit(3), "SystemExit"),
        (asyncio.CancelledError("stop"), "asyncio.exceptions.CancelledError"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_class_that_cannot_be_made_is_a_step_failed(failure: BaseException, name: str) -> None:
    raised = decode_failure(encode_failure(failure))
    assert type(raised) is StepFailed
    assert raised.type == name
    assert str(failure) in raised.text
    again = decode_failure(encode_failure(raised))
    assert everything(again) == everything(raised)


def test_the_texts_of_a_group_are_kept() -> None:
    group = ExceptionGroup("outer", [Plain("a"), ExceptionGroup("inner", [Declined("4", code=1)])])
    raised = decode_failure(encode_failure(group))
    assert isinstance(raised, StepFailed)
    assert raised.text == "outer (2 sub-exceptions): Plain: a; Declined: card 4 was declined"


def test_a_class_that_refuses_the_subclass_for_its_text_is_a_step_failed() -> None:
    raised = decode_failure(encode_failure(_frozen()))
    assert isinstance(raised, StepFailed)
    assert raised.__notes__ == ["note"]


def test_nothing_is_imported_to_find_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = ModuleType("lazy_module")
    asked: list[str] = []
    lazy.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    for name in ("lazy_module.Broken", "tomllib.never.Imported", "subprocess.Popen", "os.system", "builtins.print", ""):
        stored = msgspec.json.encode({"type": name, "text": "t", "data": {"args": ["ls"]}})
        assert type(decode_failure(stored)) is StepFailed
    assert asked == []


def test_another_process_without_the_class_gets_type_and_text() -> None:
    data = encode_failure(Declined("4242", code=7))
    script = (
        "import sys; from flowfabric.sdk.serialization.failures import decode_failure;"
        "failure = decode_failure(sys.stdin.buffer.read()); print(type(failure).__name__, failure.type, failure.text)"
    )
    done = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, check=True)
    assert done.stdout.decode().strip() == f"StepFailed {__name__}.Declined card 4242 was declined"


# -- whatever an exception does ------------------------------------------------------------------------------------


def _cyclic() -> Exception:
    failure = Plain("cycle")
    items: list[Any] = [failure]
    items.append(items)
    vars(failure).update(items=items, itself=failure)
    return failure


def _nested() -> Exception:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return Plain("deep", value)


def _nested_groups() -> Exception:
    failure: Exception = Plain("innermost")
    for _ in range(5000):
        failure = ExceptionGroup("g", [failure])
    return failure


def _odd_names() -> Exception:
    failure = Plain("names")
    vars(failure).update({"\ud800": 1, "": 2, "a b": 3, "__notes__": object(), "args": 4})
    vars(failure)[5] = 6  # type: ignore[index]
    return failure


def _odd_class() -> Exception:
    failure = type("Odd", (Exception,), {"__module__": 5, "__qualname__": "x" * 100_000})("odd")
    assert isinstance(failure, Exception)
    return failure


def _of_hostile_class() -> Exception:
    class OfHostileMeta(Exception, metaclass=HostileMeta):
        pass

    failure: Exception = type.__call__(OfHostileMeta, "x")
    return failure


HOSTILE: dict[str, Callable[[], Exception]] = {
    "no text": NoText,
    "an endless text": Endless,
    "a text that ends the process": Leaves,
    "a text that is a number": WrongText,
    "no attributes": HostileReduce,
    "a class without attributes": _of_hostile_class,
    "a class with odd names": _odd_class,
    "arguments without class": lambda: Plain(HostileValue(), [HostileValue()]),
    "a lone surrogate": lambda: Plain("\ud800 alone"),
    "a zero byte": lambda: Plain("\x00"),
    "a long text": lambda: Plain("x" * 10_000_000),
    "many arguments": lambda: Plain(*range(100_000)),
    "a large argument": lambda: Plain({str(number): number for number in range(100_000)}),
    "a text that grows when encoded": lambda: Plain("é\x01" * 8000),
    "a class in a slot": lambda: Slotted(HostileValue),
    "a class in a field": lambda: TextFromFields(object),
    "a cycle": _cyclic,
    "a deep list": _nested,
    "deep groups": _nested_groups,
    "odd names of fields": _odd_names,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_every_exception_can_be_encoded(case: str) -> None:
    failure = HOSTILE[case]()
    data, raised = remember_failure(failure)
    assert len(data) <= MAX_FAILURE_BYTES
    json.loads(data)
    later = decode_failure(data)
    if raised is not failure:
        assert everything(raised) == everything(later)
        assert encode_failure(later) == encode_failure(decode_failure(encode_failure(later)))


def test_a_failure_over_16_kib_is_kept_as_class_and_text() -> None:
    failure = Declined("4242", code=7)
    vars(failure)["body"] = "x" * MAX_FAILURE_BYTES
    raised = decode_failure(encode_failure(failure))
    assert type(raised) is Declined
    assert str(raised) == "card 4242 was declined"
    assert raised.__notes__[0].startswith("its arguments and fields were not kept: they have more than 16 KiB")
    text = str(decode_failure(encode_failure(Plain("x" * 20_000))))
    assert MAX_FAILURE_BYTES - 500 < len(text) < MAX_FAILURE_BYTES


@given(st.binary(max_size=200))
def test_bytes_that_are_no_failure_are_read_as_text(data: bytes) -> None:
    assert isinstance(decode_failure(data), StepFailed | Exception)
    assert read_failure(data).type == "Exception"
