"""The OpenAPI document, made from the table of routes: what is served is what is told."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from flowfabric import __version__
from flowfabric.server.errors import OversizeProblem, Problem
from flowfabric.server.routing import FIELDS_HEADER, HTML, OCTET_STREAM, Route, RouteGroup, Router, VariantSchema

REF_TEMPLATE = "#/components/schemas/{name}"
STATUS_DESCRIPTIONS = {
    200: "Done",
    201: "Created",
    204: "Nothing there",
    400: "The request is wrong",
    401: "No valid token",
    403: "The token is not good for this",
    404: "There is no such thing",
    408: "The body took too long",
    409: "The state does not allow it, or another moment is needed",
    413: "Too large",
    415: "Not JSON, nor bytes where a body may be bytes",
    421: "A server without a token was asked under a foreign Host",
    422: "The JSON has another shape",
    431: "Too many or too long headers",
    429: "Too much at once",
    500: "The store failed",
    503: "Not now",
    504: "Took too long",
}
STRING_SCHEMA = {"type": "string"}
PATH_PARAM_SCHEMAS = {
    "idx": {"type": "integer", "minimum": 0},
    "waitpoint_id": {"type": "string", "format": "uuid"},
}


def build_document(table: Router) -> dict[str, Any]:
    """The document."""
    operations = [(page, operation) for page in table.groups for operation in page.entries]
    schemas = _Schemas([operation for _, operation in operations])
    paths: dict[str, Any] = {}
    for page, operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(page, operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "FlowFabric",
            "version": __version__,
            "description": (
                "A durable execution engine over HTTP. Bytes are arrays of numbers, or base64 in `…_b64`, or the body "
                "itself."
            ),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": page.tag} for page in table.groups],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "responses": {str(status): _refusal(status, schemas) for status in STATUS_DESCRIPTIONS if status >= 400},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


class _Schemas:
    """A schema for each type that goes over the wire."""

    def __init__(self, operations: list[Route]) -> None:
        types: list[Any] = [Problem, OversizeProblem]
        for operation in operations:
            types += [operation.body] if operation.decoder is not None else []
            for answer in operation.responses.values():
                if isinstance(answer, VariantSchema):
                    types += [kind for _, kind in answer.variants if kind.__struct_fields__]
                elif answer is not None and not isinstance(answer, str):
                    types.append(answer)
        self._types = list(dict.fromkeys(types))
        schemas, self.components = msgspec.json.schema_components(self._types, ref_template=REF_TEMPLATE)
        self._schemas = dict(zip(self._types, schemas, strict=True))

    def of(self, kind: Any) -> dict[str, Any]:
        if isinstance(kind, VariantSchema):
            found = [self._variant(name, each) for name, each in kind.variants]
            return found[0] if len(found) == 1 else {"oneOf": found}
        schema: dict[str, Any] = self._schemas[kind]
        return schema

    def _variant(self, name: str, kind: Any) -> dict[str, Any]:
        if not kind.__struct_fields__:
            return {"const": name}
        return {"type": "object", "properties": {name: self._schemas[kind]}, "required": [name]}


def _operation(page: RouteGroup, operation: Route, schemas: _Schemas) -> dict[str, Any]:
    told: dict[str, Any] = {
        "tags": [page.tag],
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {
            **{str(status): _answer(status, kind, schemas) for status, kind in operation.responses.items()},
            **{
                str(status): {"$ref": f"#/components/responses/{status}"}
                for status in sorted(error_statuses(operation))
                if status not in operation.responses
            },
        },
    }
    names = re.findall(r"{(\w+)}", operation.path)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": PATH_PARAM_SCHEMAS.get(name, STRING_SCHEMA)}
        for name in names
    ]
    parameters += [
        {"name": one.name, "in": "query", "required": one.required, "schema": one.schema} for one in operation.query
    ]
    if operation.octets_field is not None:
        words = f"With a body of bytes, which are `{operation.octets_field}`: the other fields, as a JSON object."
        parameters.append(
            {"name": FIELDS_HEADER, "in": "header", "required": False, "schema": STRING_SCHEMA, "description": words}
        )
    if parameters:
        told["parameters"] = parameters
    if operation.decoder is not None:
        content = {"application/json": {"schema": schemas.of(operation.body)}}
        if operation.octets_field is not None:
            content[OCTET_STREAM] = {"schema": {"type": "string", "format": "binary"}}
        told["requestBody"] = {"required": True, "content": content}
    elif operation.body is bytes:
        form = {"application/x-www-form-urlencoded": {"schema": {"type": "object"}}}
        told["requestBody"] = {"required": True, "content": form}
    if operation.scope is not None:
        told["security"] = [{"token": []}]
        told["x-scope"] = operation.scope.value
    return told


def error_statuses(operation: Route) -> frozenset[int]:
    """Which refusals an operation may answer with."""
    found = {400, 421, 429, 431, 500, 503, 504, *operation.error_statuses}
    if operation.scope is not None:
        found |= {401, 403}
    if "{" in operation.path:
        found |= {404}
    if operation.method != "GET":
        found |= {408, 409, 413}
    if operation.decoder is not None:
        found |= {404, 415, 422}
    return frozenset(found)


def _answer(status: int, kind: Any, schemas: _Schemas) -> dict[str, Any]:
    told: dict[str, Any] = {"description": STATUS_DESCRIPTIONS[status]}
    if isinstance(kind, str):
        told["content"] = {kind: {"schema": {"type": "string"}}}
    elif kind is not None:
        told["content"] = {"application/json": {"schema": schemas.of(kind)}}
    return told


def _refusal(status: int, schemas: _Schemas) -> dict[str, Any]:
    schema = schemas.of(OversizeProblem if status == 413 else Problem)
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if status in (400, 403, 404, 409):
        content[HTML] = {"schema": {"type": "string"}}
    return {"description": STATUS_DESCRIPTIONS[status], "content": content}
