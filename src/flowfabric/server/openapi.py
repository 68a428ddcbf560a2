"""The OpenAPI document, built from the routes that the server serves."""

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


def build_document(router: Router) -> dict[str, Any]:
    """Build the OpenAPI document of a router."""
    groups = [group for group in router.groups if group.is_documented]
    routes = [(group, route) for group in groups for route in group.entries]
    schemas = _Schemas([route for _, route in routes])
    paths: dict[str, Any] = {}
    for group, route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(group, route, schemas)
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
        "tags": [{"name": group.tag} for group in groups],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "responses": {
                str(status): _error_response(status, schemas) for status in STATUS_DESCRIPTIONS if status >= 400
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


class _Schemas:
    """The schemas of all request and response types, named by class."""

    def __init__(self, routes: list[Route]) -> None:
        types: list[Any] = [Problem, OversizeProblem]
        for route in routes:
            types += [route.body] if route.decoder is not None else []
            for response in route.responses.values():
                if isinstance(response, VariantSchema):
                    types += [kind for _, kind in response.variants if kind.__struct_fields__]
                elif response is not None and not isinstance(response, str):
                    types.append(response)
        self._types = list(dict.fromkeys(types))
        schemas, self.components = msgspec.json.schema_components(self._types, ref_template=REF_TEMPLATE)
        self._schemas = dict(zip(self._types, schemas, strict=True))

    def of(self, kind: Any) -> dict[str, Any]:
        if isinstance(kind, VariantSchema):
            schemas = [self._variant(name, each) for name, each in kind.variants]
            return schemas[0] if len(schemas) == 1 else {"oneOf": schemas}
        schema: dict[str, Any] = self._schemas[kind]
        return schema

    def _variant(self, name: str, kind: Any) -> dict[str, Any]:
        if not kind.__struct_fields__:
            return {"const": name}
        return {"type": "object", "properties": {name: self._schemas[kind]}, "required": [name]}


def _operation(group: RouteGroup, route: Route, schemas: _Schemas) -> dict[str, Any]:
    document: dict[str, Any] = {
        "tags": [group.tag],
        "operationId": route.name,
        "summary": route.summary,
        "responses": {
            **{str(status): _response(status, kind, schemas) for status, kind in route.responses.items()},
            **{
                str(status): {"$ref": f"#/components/responses/{status}"}
                for status in sorted(error_statuses(route))
                if status not in route.responses
            },
        },
    }
    names = re.findall(r"{(\w+)}", route.path)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": PATH_PARAM_SCHEMAS.get(name, STRING_SCHEMA)}
        for name in names
    ]
    parameters += [
        {"name": param.name, "in": "query", "required": param.required, "schema": param.schema} for param in route.query
    ]
    if route.octets_field is not None:
        description = f"With a body of bytes, which are `{route.octets_field}`: the other fields, as a JSON object."
        parameters.append(
            {
                "name": FIELDS_HEADER,
                "in": "header",
                "required": False,
                "schema": STRING_SCHEMA,
                "description": description,
            }
        )
    if parameters:
        document["parameters"] = parameters
    if route.decoder is not None:
        content = {"application/json": {"schema": schemas.of(route.body)}}
        if route.octets_field is not None:
            content[OCTET_STREAM] = {"schema": {"type": "string", "format": "binary"}}
        document["requestBody"] = {"required": True, "content": content}
    elif route.body is bytes:
        form = {"application/x-www-form-urlencoded": {"schema": {"type": "object"}}}
        document["requestBody"] = {"required": True, "content": form}
    if route.scope is not None:
        document["security"] = [{"token": []}]
        document["x-scope"] = route.scope.value
    return document


def error_statuses(route: Route) -> frozenset[int]:
    """Return the error statuses that a route may answer with."""
    statuses = {400, 421, 429, 431, 500, 503, 504, *route.refusals}
    if route.scope is not None:
        statuses |= {401, 403}
    if "{" in route.path:
        statuses |= {404}
    if route.method != "GET":
        statuses |= {408, 409, 413}
    if route.decoder is not None:
        statuses |= {404, 415, 422}
    return frozenset(statuses)


def _response(status: int, kind: Any, schemas: _Schemas) -> dict[str, Any]:
    document: dict[str, Any] = {"description": STATUS_DESCRIPTIONS[status]}
    if isinstance(kind, str):
        document["content"] = {kind: {"schema": {"type": "string"}}}
    elif kind is not None:
        document["content"] = {"application/json": {"schema": schemas.of(kind)}}
    return document


def _error_response(status: int, schemas: _Schemas) -> dict[str, Any]:
    schema = schemas.of(OversizeProblem if status == 413 else Problem)
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if status in (400, 403, 404, 409):
        content[HTML] = {"schema": {"type": "string"}}
    return {"description": STATUS_DESCRIPTIONS[status], "content": content}
