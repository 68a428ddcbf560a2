"""Encodes and decodes the values of a task as JSON, and checks them against its annotations in both directions.

Types that contain a pydantic model or constraint are handled by pydantic, all others by msgspec. Encoding has a fast
path, which encodes a value directly and accepts the result if it decodes again. Only what the fast path rejects is
converted piece by piece, which also yields the error message.
"""

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
PYDANTIC_MODULES = {"pydantic", "annotated_types"}  # modules of the constraints that pydantic reads in `Annotated`

_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"').sub
_BRACKETS = re.compile(rb"[\[\]{}]").findall

from_json = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def json_bytes(plain: Any) -> bytes:
    """Encode plain data as JSON; data that JSON cannot represent, such as NaN, is refused."""
    try:
        data = _encode(plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"not JSON: {_one_line(error)}") from error
    if b"null" in data and _has_non_finite(plain):
        raise InvalidInput("not JSON: a number in it is not a number, or infinite")
    return check_depth(data)


def check_depth(data: bytes) -> bytes:
    """Refuse JSON nested so deeply that some Python versions cannot decode it; from 3.13 on the encoder goes deeper."""
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        depth = 0
        for bracket in _BRACKETS(_STRINGS(b"", data)):
            depth += 1 if bracket in b"[{" else -1
            if depth > MAX_DEPTH:
                raise InvalidInput(f"not JSON that can be read again: it is nested deeper than {MAX_DEPTH} levels")
    return data


def to_plain(value: Any) -> Any:
    """Convert a value without annotation to plain data; it may contain pydantic models."""
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_dump_model)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"not JSON: {_one_line(error)}") from error


def _dump_model(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} has no JSON form")


_encode_any = msgspec.json.Encoder(enc_hook=_dump_model).encode


def _has_non_finite(plain: Any) -> bool:
    """True if the data contains NaN or infinity, which the encoder writes as null."""
    match plain:
        case float():
            return not math.isfinite(plain)
        case dict():
            return any(map(_has_non_finite, plain.values()))
        case list() | tuple():
            return any(map(_has_non_finite, plain))
        case _:
            return False


class ValueCodec:
    """Encodes and decodes the values of one annotated type; `InvalidInput` says what is wrong with a value."""

    def __init__(self, annotation: Any) -> None:
        self.annotation = Any if annotation is inspect.Parameter.empty else annotation
        self._adapter = _pydantic_adapter(self.annotation)
        self._decode = None if self._adapter is not None or self.annotation is Any else _decoder(self.annotation)

    @property
    def needs_pydantic(self) -> bool:
        """True if values are checked by pydantic."""
        return self._adapter is not None

    def dump(self, value: Any, name: str) -> Any:
        """Convert a value to plain data; one that does not fit the annotation is refused."""
        try:
            if self._adapter is not None:
                valid = self._adapter.validate_python(value)
                plain = self._adapter.dump_python(valid, mode="json", by_alias=True, warnings=False)
                # Again, since pydantic does not validate a model instance that was changed after its creation.
                self._adapter.validate_python(plain)
                return plain
            plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_dump_model)
            if self.annotation is not Any:
                msgspec.convert(plain, self.annotation, str_keys=True)
            return plain
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(f"{name}: {_one_line(error)}{_unawaited_hint(value)}") from error

    def load(self, plain: Any, name: str) -> Any:
        """Convert plain data to a value of the annotation."""
        try:
            if self._adapter is not None:
                return self._adapter.validate_python(plain)
            return plain if self.annotation is Any else msgspec.convert(plain, self.annotation, str_keys=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(f"{name}: {_one_line(error)}") from error

    def to_json(self, value: Any, name: str) -> bytes:
        """Encode a value as JSON; one that does not fit the annotation is refused."""
        data = None if self._decode is None else _encode_fast(value, self._decode)
        return json_bytes(self.dump(value, name)) if data is None else check_depth(data)

    def from_json(self, data: bytes | None, name: str) -> Any:
        """Decode JSON to a value of the annotation; no JSON counts as null."""
        if self._decode is not None and data:
            try:
                return self._decode(data)
            except (TypeError, ValueError, RecursionError):
                pass  # `load` says what is wrong
        return self.load(from_json(data) if data else None, name)

    def schema(self) -> str | None:
        """Return the JSON schema of the annotation, for forms; None if it has none."""
        try:
            document = msgspec.json.schema(self.annotation) if self._adapter is None else self._adapter.json_schema()
        except (TypeError, ValueError):
            return None
        return json_bytes(document).decode()


def _default_of(codec: ValueCodec, default: Any) -> dict[str, Any]:
    """Return the default of a parameter for its schema; nothing if it has none or has no JSON form."""
    if default is inspect.Parameter.empty:
        return {}
    try:
        return {"default": from_json(codec.to_json(default, "default"))}
    except InvalidInput:
        return {}


def incoming_codec(annotation: Any, name: str) -> ValueCodec:
    """Return the codec of a message or vote; refuse a type that no JSON can be decoded to, before anyone is asked."""
    codec = ValueCodec(annotation)
    if not codec.needs_pydantic and codec.annotation is not Any:
        try:
            msgspec.json.schema(codec.annotation)
        except (TypeError, ValueError, NameError) as error:
            hint = "pass a type that JSON can be decoded to, like bool, dict[str, int], a dataclass or a model"
            raise InvalidInput(f"{name}: {annotation!r} cannot be asked for; {hint}") from error
    return codec


class Signature:
    """The parameters of a handler, without its context, and the codecs of their values and of the result."""

    def __init__(self, handler: Callable[..., Any], context: type) -> None:
        handler_name = handler.__qualname__
        try:
            hints = typing.get_type_hints(handler, include_extras=True)
        except (NameError, TypeError) as error:
            raise InvalidInput(
                f"task {handler_name}: its annotations cannot be read ({error}); types that it names must be in its "
                "module"
            ) from error
        signature = inspect.signature(handler)
        self.context_name: str | None = None
        parameters = []
        self.parameter_codecs: dict[str, ValueCodec] = {}
        for name, parameter in signature.parameters.items():
            annotation = hints.get(name, inspect.Parameter.empty)
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise InvalidInput(f"task {handler_name}: *{name} cannot be stored; name each parameter")
            if _is_a(annotation, context):
                if self.context_name is not None:
                    raise InvalidInput(f"task {handler_name}: {self.context_name} and {name} are both the context")
                self.context_name = name
                continue
            parameters.append(parameter)
            self.parameter_codecs[name] = ValueCodec(annotation)
        self._signature = signature.replace(parameters=parameters)
        self._name = handler_name
        self._is_simple = all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
        self._required = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
        self._decode = _arguments_decoder(parameters, self.parameter_codecs)
        self.result_codec = ValueCodec(hints.get("return", Any))
        if self.result_codec.annotation is type(None):
            self.result_codec = ValueCodec(Any)

    def input_schema(self) -> str | None:
        """Return the JSON schema of the arguments by name, for forms; None if one of them has none."""
        properties: dict[str, Any] = {}
        definitions: dict[str, Any] = {}
        for name, codec in self.parameter_codecs.items():
            text = codec.schema()
            if text is None:
                return None
            schema = from_json(text)
            for key, definition in schema.pop("$defs", {}).items():
                if definitions.setdefault(key, definition) != definition:  # two types with one name
                    return None
            default = self._signature.parameters[name].default
            properties[name] = schema | _default_of(codec, default)
        document = {"type": "object", "properties": properties, "required": sorted(self._required)}
        return json_bytes(document | ({"$defs": definitions} if definitions else {})).decode()

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by parameter name."""
        if self._is_simple:  # takes a tenth of the time of inspect's binding
            named = dict(zip(self.parameter_codecs, args, strict=False)) | kwargs
            if len(named) == len(args) + len(kwargs) and self._required <= named.keys() <= self.parameter_codecs.keys():
                return {name: named[name] for name in self.parameter_codecs if name in named}
        try:
            return dict(self._signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            is_unannotated = self.context_name is None and "ctx" in self.parameter_codecs and "ctx" not in kwargs
            hint = "; ctx is an ordinary parameter unless it is annotated: ctx: Context" if is_unannotated else ""
            raise InvalidInput(f"{self._name}: {error}{hint}") from error

    def with_defaults(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments in the order of the parameters, with defaults for those that are missing."""
        defaults = {name: parameter.default for name, parameter in self._signature.parameters.items()}
        values = {name: arguments.get(name, default) for name, default in defaults.items()}
        return {name: value for name, value in values.items() if value is not inspect.Parameter.empty}

    def dump(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the arguments to plain data; one that does not fit its annotation is refused."""
        return {name: self.parameter_codecs[name].dump(value, name) for name, value in arguments.items()}

    def to_json(self, arguments: Mapping[str, Any]) -> bytes:
        """Encode the arguments as JSON; one that does not fit its annotation is refused."""
        data = None if self._decode is None else _encode_fast(arguments, self._decode)
        return json_bytes(self.dump(arguments)) if data is None else check_depth(data)

    def load(self, payload: bytes) -> dict[str, Any]:
        """Decode the stored arguments; parameters added since then get their defaults."""
        if self._decode is not None:
            try:
                return self._decode(payload or b"{}")
            except msgspec.DecodeError:
                pass  # `load` says what is wrong
        return self._load_each(payload)

    def _load_each(self, payload: bytes) -> dict[str, Any]:
        try:
            plain = from_json(payload or b"{}")
        except msgspec.DecodeError as error:
            raise InvalidInput(f"input: {error}") from error
        if not isinstance(plain, dict):
            raise InvalidInput("input: not a JSON object of parameters")
        arguments = {
            name: codec.load(plain[name], name) for name, codec in self.parameter_codecs.items() if name in plain
        }
        try:
            self._signature.bind(**arguments)
        except TypeError as error:
            raise InvalidInput(f"input: {error}") from error
        return arguments


def _encode_fast(value: Any, decode: Callable[[bytes], Any]) -> bytes | None:
    """Encode a value if the result decodes again; None if it has to be checked piece by piece."""
    try:
        data = _encode_any(value)
        if b"null" not in data:  # a null may be an encoded NaN
            decode(data)
            return data
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    return None


def _decoder(annotation: Any) -> Callable[[bytes], Any] | None:
    """Return a decoder for an annotation, which takes a fraction of the time of `msgspec.convert`."""
    try:
        return msgspec.json.Decoder(annotation).decode
    except (TypeError, ValueError, NameError):
        return None  # the annotation is only refused when a value is checked against it


def _arguments_decoder(
    parameters: list[inspect.Parameter], codecs: Mapping[str, ValueCodec]
) -> Callable[[bytes], dict[str, Any]] | None:
    """Return a decoder for all arguments at once; None if one of them needs pydantic or is positional-only."""
    if any(codec.needs_pydantic for codec in codecs.values()):
        return None
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
        return None
    fields: dict[str, Any] = {}
    try:
        for parameter in parameters:
            annotation = codecs[parameter.name].annotation
            is_required = parameter.default is parameter.empty
            fields[parameter.name] = annotation if is_required else typing.NotRequired[annotation]
        return _decoder(typing.TypedDict("Arguments", fields))  # type: ignore[operator]
    except (TypeError, ValueError):
        return None


def _pydantic_adapter(annotation: Any) -> Any:
    """Return pydantic's adapter for a type that contains a pydantic model or constraint; None for other types."""
    if not HAS_PYDANTIC or not _mentions_model(annotation):
        return None
    import pydantic

    try:
        return pydantic.TypeAdapter(annotation)
    except pydantic.errors.PydanticUserError as error:
        raise InvalidInput(f"{annotation}: {_one_line(error)}") from error


def _is_a(annotation: Any, kind: type) -> bool:
    """True if an annotation is this class or a subclass, possibly in a union or in `Annotated`."""
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
        modules = (type(item).__module__.partition(".")[0] for item in annotation.__metadata__)
        return any(module in PYDANTIC_MODULES for module in modules) or _mentions_model(annotation.__origin__, seen)
    parts = [*typing.get_args(annotation), *_field_types(annotation)]
    return any(_mentions_model(part, (*seen, annotation)) for part in parts if part not in seen)


def _field_types(annotation: Any) -> list[Any]:
    """Return the types of the fields of a dataclass, a TypedDict or a named tuple."""
    if not isinstance(annotation, type) or not (
        dataclasses.is_dataclass(annotation) or typing.is_typeddict(annotation) or hasattr(annotation, "_fields")
    ):
        return []
    try:
        return [*typing.get_type_hints(annotation).values()]
    except (TypeError, NameError):
        return []


def _unawaited_hint(value: Any) -> str:
    if not inspect.iscoroutine(value):
        return ""
    value.close()  # or Python would warn about it as well
    return f"; {value.__qualname__} was not awaited (a plain function calls it through ctx.sync)"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
