"""Values of a task on their way through JSON: checked by annotation when they go and when they come."""

from __future__ import annotations

import importlib.util
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from flowfabric.errors import InvalidInput

HAS_PYDANTIC = importlib.util.find_spec("pydantic") is not None

LONGEST_SCHEMA = 16_384

json_bytes = msgspec.json.Encoder().encode
from_json = msgspec.json.Decoder().decode


class Shape:
    """One annotated type: values become plain JSON data and back, or `InvalidInput` names what is wrong."""

    def __init__(self, annotation: Any) -> None:
        self.annotation = Any if annotation is inspect.Parameter.empty else annotation
        self._adapter = _adapter(self.annotation)

    @property
    def needs_pydantic(self) -> bool:
        """Whether values of it are checked by pydantic."""
        return self._adapter is not None

    def dump(self, value: Any, name: str) -> Any:
        """Plain data for a value that fits the annotation."""
        try:
            if self._adapter is not None:
                return self._adapter.dump_python(self._adapter.validate_python(value), mode="json")
            plain = msgspec.to_builtins(value)
            if self.annotation is not Any:
                msgspec.convert(plain, self.annotation)
            return plain
        except (TypeError, ValueError, msgspec.ValidationError) as fault:
            raise InvalidInput(f"{name}: {_words(fault)}") from fault

    def load(self, plain: Any, name: str) -> Any:
        """The value that the plain data stand for."""
        try:
            if self._adapter is not None:
                return self._adapter.validate_python(plain)
            return plain if self.annotation is Any else msgspec.convert(plain, self.annotation)
        except (TypeError, ValueError, msgspec.ValidationError) as fault:
            raise InvalidInput(f"{name}: {_words(fault)}") from fault

    def schema(self) -> str | None:
        """The JSON schema of the annotation, for forms; None for what has none, or a very long one."""
        try:
            document = msgspec.json.schema(self.annotation) if self._adapter is None else self._adapter.json_schema()
        except (TypeError, ValueError):
            return None
        text = json_bytes(document).decode()
        return text if len(text) <= LONGEST_SCHEMA else None


class Signature:
    """The parameters of a handler, without its context."""

    def __init__(self, handler: Callable[..., Any], context: type) -> None:
        hints = typing.get_type_hints(handler)
        full = inspect.signature(handler)
        self.context_name: str | None = None
        kept = []
        self.shapes: dict[str, Shape] = {}
        for name, parameter in full.parameters.items():
            annotation = hints.get(name, inspect.Parameter.empty)
            if isinstance(annotation, type) and issubclass(annotation, context):
                self.context_name = name
                continue
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise TypeError(f"{handler.__qualname__}: *{name} cannot be kept; name each parameter")
            kept.append(parameter)
            self.shapes[name] = Shape(annotation)
        self._signature = full.replace(parameters=kept)
        self._is_simple = all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in kept)
        self._needed = {parameter.name for parameter in kept if parameter.default is parameter.empty}
        self._decode = _decoder(kept, self.shapes)
        self.result = Shape(hints.get("return", Any))
        if self.result.annotation is type(None):
            self.result = Shape(Any)

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by the names of the parameters."""
        if self._is_simple:  # a tenth of what binding costs
            given = dict(zip(self.shapes, args, strict=False)) | kwargs
            if len(given) == len(args) + len(kwargs) and self._needed <= given.keys() <= self.shapes.keys():
                return {name: given[name] for name in self.shapes if name in given}
        try:
            return dict(self._signature.bind(*args, **kwargs).arguments)
        except TypeError as fault:
            raise InvalidInput(str(fault)) from fault

    def plain(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as plain JSON data; one that does not fit is refused."""
        return {name: self.shapes[name].dump(value, name) for name, value in arguments.items()}

    def load(self, payload: bytes) -> dict[str, Any]:
        """The keyword arguments that were dumped; parameters added since then take their defaults."""
        if self._decode is not None:
            try:
                arguments = msgspec.structs.asdict(self._decode(payload or b"{}"))
            except msgspec.DecodeError:
                pass  # looked at piece by piece, it is told what is wrong
            else:
                if len(self._needed) == len(self.shapes):
                    return arguments
                return {name: value for name, value in arguments.items() if value is not UNSET}
        return self._load_each(payload)

    def _load_each(self, payload: bytes) -> dict[str, Any]:
        try:
            plain = from_json(payload or b"{}")
        except msgspec.DecodeError as fault:
            raise InvalidInput(f"input: {fault}") from fault
        if not isinstance(plain, dict):
            raise InvalidInput("input: not a JSON object of parameters")
        arguments = {name: shape.load(plain[name], name) for name, shape in self.shapes.items() if name in plain}
        try:
            self._signature.bind(**arguments)
        except TypeError as fault:
            raise InvalidInput(f"input: {fault}") from fault
        return arguments


def _decoder(parameters: list[inspect.Parameter], shapes: Mapping[str, Shape]) -> Callable[[bytes], Any] | None:
    """Reads all parameters in one go; None when some of them need more than that."""
    if any(shape.needs_pydantic for shape in shapes.values()):
        return None
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
        return None
    fields: list[Any] = []
    try:
        for parameter in parameters:
            kind = shapes[parameter.name].annotation
            needed = parameter.default is parameter.empty
            fields.append((parameter.name, kind) if needed else (parameter.name, kind | msgspec.UnsetType, UNSET))
        return msgspec.json.Decoder(msgspec.defstruct("Arguments", fields, kw_only=True)).decode
    except (TypeError, ValueError):
        return None  # an annotation of which only a value will show that it is of no use


def _adapter(annotation: Any) -> Any:
    """pydantic's adapter for types that contain a model of pydantic's; the others need no pydantic."""
    if not HAS_PYDANTIC or not _mentions_model(annotation):
        return None
    import pydantic

    return pydantic.TypeAdapter(annotation)


def _mentions_model(annotation: Any) -> bool:
    import pydantic

    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return True
    return any(_mentions_model(argument) for argument in typing.get_args(annotation))


def _words(fault: Exception) -> str:
    return " ".join(str(fault).split())
