"""Values of a task on their way through JSON: checked by annotation when they go and when they come."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from flowfabric.errors import InvalidInput

HAS_PYDANTIC = importlib.util.find_spec("pydantic") is not None

MAX_DEPTH = 500
PYDANTIC_MODULES = {"pydantic", "annotated_types"}  # where what it understands in `Annotated` comes from

_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"').sub
_BRACKETS = re.compile(rb"[\[\]{}]").findall

from_json = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def json_bytes(plain: Any) -> bytes:
    """Plain data as JSON; what JSON has no words for is refused, not bent."""
    try:
        data = _encode(plain)
    except (TypeError, ValueError, RecursionError) as fault:
        raise InvalidInput(f"not JSON: {_words(fault)}") from fault
    if b"null" in data and _has_no_number(plain):
        raise InvalidInput("not JSON: a number in it is not a number, or infinite")
    return check_depth(data)


def check_depth(data: bytes) -> bytes:
    """Refuse JSON that is nested deeper than every Python can read: from 3.13 on the encoder goes far deeper."""
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        depth = 0
        for mark in _BRACKETS(_STRINGS(b"", data)):
            depth += 1 if mark in b"[{" else -1
            if depth > MAX_DEPTH:
                raise InvalidInput(f"not JSON that can be read again: it is nested deeper than {MAX_DEPTH} levels")
    return data


def to_plain(value: Any) -> Any:
    """Plain data for a value whose type nobody named; models of pydantic's among it."""
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_model_data)
    except (TypeError, ValueError, RecursionError) as fault:
        raise InvalidInput(f"not JSON: {_words(fault)}") from fault


def _model_data(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} has no JSON form")


_encode_any = msgspec.json.Encoder(enc_hook=_model_data).encode


def _has_no_number(plain: Any) -> bool:
    """Whether there is a float in it that JSON would write as null."""
    match plain:
        case float():
            return not math.isfinite(plain)
        case dict():
            return any(map(_has_no_number, plain.values()))
        case list() | tuple():
            return any(map(_has_no_number, plain))
        case _:
            return False


class ValueCodec:
    """One annotated type: values become plain JSON data and back, or `InvalidInput` names what is wrong."""

    def __init__(self, annotation: Any) -> None:
        self.annotation = Any if annotation is inspect.Parameter.empty else annotation
        self._adapter = _adapter(self.annotation)
        self._decode = None if self._adapter is not None or self.annotation is Any else _decoder(self.annotation)

    @property
    def needs_pydantic(self) -> bool:
        """Whether values of it are checked by pydantic."""
        return self._adapter is not None

    def dump(self, value: Any, name: str) -> Any:
        """Plain data for a value that fits the annotation."""
        try:
            if self._adapter is not None:
                valid = self._adapter.validate_python(value)
                plain = self._adapter.dump_python(valid, mode="json", by_alias=True, warnings=False)
                self._adapter.validate_python(
                    plain
                )  # a model that was changed since it was made is not looked at again
                return plain
            plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_model_data)
            if self.annotation is not Any:
                msgspec.convert(plain, self.annotation, str_keys=True)
            return plain
        except (TypeError, ValueError, RecursionError) as fault:
            raise InvalidInput(f"{name}: {_words(fault)}{_unawaited(value)}") from fault

    def load(self, plain: Any, name: str) -> Any:
        """The value that the plain data stand for."""
        try:
            if self._adapter is not None:
                return self._adapter.validate_python(plain)
            return plain if self.annotation is Any else msgspec.convert(plain, self.annotation, str_keys=True)
        except (TypeError, ValueError, RecursionError) as fault:
            raise InvalidInput(f"{name}: {_words(fault)}") from fault

    def to_json(self, value: Any, name: str) -> bytes:
        """A value that fits the annotation, as JSON."""
        data = None if self._decode is None else _encoded(value, self._decode)
        return json_bytes(self.dump(value, name)) if data is None else check_depth(data)

    def from_json(self, data: bytes | None, name: str) -> Any:
        """The value that the JSON stands for; no JSON is null."""
        if self._decode is not None and data:
            try:
                return self._decode(data)
            except (TypeError, ValueError, RecursionError):
                pass  # looked at piece by piece, it is told what is wrong
        return self.load(from_json(data) if data else None, name)

    def schema(self) -> str | None:
        """The JSON schema of the annotation, for forms; None for what has none."""
        try:
            document = msgspec.json.schema(self.annotation) if self._adapter is None else self._adapter.json_schema()
        except (TypeError, ValueError):
            return None
        return json_bytes(document).decode()


def incoming_codec(annotation: Any, name: str) -> ValueCodec:
    """The shape of what somebody will be asked for; refused before anybody is when no answer could be read as it."""
    shape = ValueCodec(annotation)
    if not shape.needs_pydantic and shape.annotation is not Any:
        try:
            msgspec.json.schema(shape.annotation)
        except (TypeError, ValueError, NameError) as fault:
            hint = "hand over a type that JSON can be read as, like bool, dict[str, int], a dataclass or a model"
            raise InvalidInput(f"{name}: {annotation!r} cannot be asked for; {hint}") from fault
    return shape


class Signature:
    """The parameters of a handler, without its context."""

    def __init__(self, handler: Callable[..., Any], context: type) -> None:
        what = handler.__qualname__
        try:
            hints = typing.get_type_hints(handler, include_extras=True)
        except (NameError, TypeError) as fault:
            raise InvalidInput(
                f"task {what}: its annotations cannot be read ({fault}); types that it names must stand in its module"
            ) from fault
        full = inspect.signature(handler)
        self.context_name: str | None = None
        kept = []
        self.parameter_codecs: dict[str, ValueCodec] = {}
        for name, parameter in full.parameters.items():
            annotation = hints.get(name, inspect.Parameter.empty)
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise InvalidInput(f"task {what}: *{name} cannot be kept; name each parameter")
            if _is_a(annotation, context):
                if self.context_name is not None:
                    raise InvalidInput(f"task {what}: {self.context_name} and {name} are both the context")
                self.context_name = name
                continue
            kept.append(parameter)
            self.parameter_codecs[name] = ValueCodec(annotation)
        self._signature = full.replace(parameters=kept)
        self._name = what
        self._is_simple = all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in kept)
        self._needed = {parameter.name for parameter in kept if parameter.default is parameter.empty}
        self._decode = _arguments_decoder(kept, self.parameter_codecs)
        self.result_codec = ValueCodec(hints.get("return", Any))
        if self.result_codec.annotation is type(None):
            self.result_codec = ValueCodec(Any)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by the names of the parameters."""
        if self._is_simple:  # a tenth of what binding costs
            given = dict(zip(self.parameter_codecs, args, strict=False)) | kwargs
            if len(given) == len(args) + len(kwargs) and self._needed <= given.keys() <= self.parameter_codecs.keys():
                return {name: given[name] for name in self.parameter_codecs if name in given}
        try:
            return dict(self._signature.bind(*args, **kwargs).arguments)
        except TypeError as fault:
            missing = self.context_name is None and "ctx" in self.parameter_codecs and "ctx" not in kwargs
            hint = "; ctx is an ordinary parameter unless it is annotated: ctx: Context" if missing else ""
            raise InvalidInput(f"{self._name}: {fault}{hint}") from fault

    def with_defaults(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments in the order of the parameters, with the defaults of those that are left out."""
        defaults = {name: one.default for name, one in self._signature.parameters.items()}
        known = {name: arguments.get(name, default) for name, default in defaults.items()}
        return {name: value for name, value in known.items() if value is not inspect.Parameter.empty}

    def dump(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as plain JSON data; one that does not fit is refused."""
        return {name: self.parameter_codecs[name].dump(value, name) for name, value in arguments.items()}

    def to_json(self, arguments: Mapping[str, Any]) -> bytes:
        """The same, as JSON."""
        data = None if self._decode is None else _encoded(arguments, self._decode)
        return json_bytes(self.dump(arguments)) if data is None else check_depth(data)

    def load(self, payload: bytes) -> dict[str, Any]:
        """The keyword arguments that were dumped; parameters added since then take their defaults."""
        if self._decode is not None:
            try:
                return self._decode(payload or b"{}")
            except msgspec.DecodeError:
                pass  # looked at piece by piece, it is told what is wrong
        return self._load_each(payload)

    def _load_each(self, payload: bytes) -> dict[str, Any]:
        try:
            plain = from_json(payload or b"{}")
        except msgspec.DecodeError as fault:
            raise InvalidInput(f"input: {fault}") from fault
        if not isinstance(plain, dict):
            raise InvalidInput("input: not a JSON object of parameters")
        arguments = {
            name: shape.load(plain[name], name) for name, shape in self.parameter_codecs.items() if name in plain
        }
        try:
            self._signature.bind(**arguments)
        except TypeError as fault:
            raise InvalidInput(f"input: {fault}") from fault
        return arguments


def _encoded(value: Any, fits: Callable[[bytes], Any]) -> bytes | None:
    """The value as JSON if that can be read again; None when it has to be looked at piece by piece to tell."""
    try:
        data = _encode_any(value)
        if b"null" not in data:  # which may have been a number that is none
            fits(data)
            return data
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    return None


def _decoder(annotation: Any) -> Callable[[bytes], Any] | None:
    """Reads JSON as what is annotated, for a fraction of what converting takes."""
    try:
        return msgspec.json.Decoder(annotation).decode
    except (TypeError, ValueError, NameError):
        return None  # an annotation of which only a value will show that it is of no use


def _arguments_decoder(
    parameters: list[inspect.Parameter], shapes: Mapping[str, ValueCodec]
) -> Callable[[bytes], dict[str, Any]] | None:
    """Reads all parameters in one go; None when some of them need more than that."""
    if any(shape.needs_pydantic for shape in shapes.values()):
        return None
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
        return None
    fields: dict[str, Any] = {}
    try:
        for parameter in parameters:
            kind = shapes[parameter.name].annotation
            fields[parameter.name] = kind if parameter.default is parameter.empty else typing.NotRequired[kind]
        return _decoder(typing.TypedDict("Arguments", fields))  # type: ignore[operator]
    except (TypeError, ValueError):
        return None


def _adapter(annotation: Any) -> Any:
    """pydantic's adapter for types that contain a model or a condition of pydantic's; the others need no pydantic."""
    if not HAS_PYDANTIC or not _mentions_model(annotation):
        return None
    import pydantic

    try:
        return pydantic.TypeAdapter(annotation)
    except pydantic.errors.PydanticUserError as fault:
        raise InvalidInput(f"{annotation}: {_words(fault)}") from fault


def _is_a(annotation: Any, kind: type) -> bool:
    """Whether a parameter is annotated as this, or as this or None."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = annotation.__origin__
    optional = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    parts = typing.get_args(annotation) if optional else (annotation,)
    return any(isinstance(part, type) and issubclass(part, kind) for part in parts)


def _mentions_model(annotation: Any, seen: tuple[Any, ...] = ()) -> bool:
    import pydantic

    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return True
    if typing.get_origin(annotation) is typing.Annotated:
        asks = (type(one).__module__.partition(".")[0] for one in annotation.__metadata__)
        return any(one in PYDANTIC_MODULES for one in asks) or _mentions_model(annotation.__origin__, seen)
    parts = [*typing.get_args(annotation), *_fields_of(annotation)]
    return any(_mentions_model(part, (*seen, annotation)) for part in parts if part not in seen)


def _fields_of(annotation: Any) -> list[Any]:
    """The types of what a dataclass, a TypedDict or a named tuple consists of."""
    if not isinstance(annotation, type) or not (
        dataclasses.is_dataclass(annotation) or typing.is_typeddict(annotation) or hasattr(annotation, "_fields")
    ):
        return []
    try:
        return [*typing.get_type_hints(annotation).values()]
    except (TypeError, NameError):
        return []


def _unawaited(value: Any) -> str:
    if not inspect.iscoroutine(value):
        return ""
    value.close()  # told here; Python need not warn of it as well
    return f"; {value.__qualname__} was not awaited (a plain function calls it through ctx.sync)"


def _words(fault: Exception) -> str:
    return " ".join(str(fault).split())
