"""The OpenAPI 3.1 document of the market, made from the very routes and messages that it serves."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

from relay.identity import PROTOCOL_VERSION

from . import messages as m
from .requests import CERTIFICATE_HEADER, KEY_HEADER, NONCE_HEADER, SIGNATURE_HEADER, TIME_HEADER
from .routes import PREFIX, ROUTES, Route
from .wire import nested, object_schema, schema

_PARAMETER: Final = re.compile(r"\{(\w+)\}")
_PARAMETERS: Final[dict[str, dict[str, Any]]] = {
    "lease": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    "plan": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    "device": {"type": "string"},
    "wallet": {"type": "string"},
    "record": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
}


@cache
def document() -> dict[str, Any]:
    """The whole document, as JSON values."""
    messages: set[type] = {m.ErrorAnswer, m.ErrorBody, *nested(m.ChangeListing)}
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        for kind in (route.body, route.answer):
            messages |= nested(kind) if kind is not None else set()
        paths.setdefault(PREFIX + route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Kvasir market", "version": f"{PROTOCOL_VERSION}"},
        "paths": paths,
        "components": {
            "schemas": {kind.__name__: object_schema(kind) for kind in sorted(messages, key=_name)},
            "securitySchemes": {
                header: {"type": "apiKey", "in": "header", "name": header}
                for header in (KEY_HEADER, TIME_HEADER, NONCE_HEADER, SIGNATURE_HEADER, CERTIFICATE_HEADER)
            },
        },
    }


def _name(kind: type) -> str:
    return kind.__name__


def _operation(route: Route) -> dict[str, Any]:
    content = "text/event-stream" if route.answer is None else "application/json"
    answer = {"type": "string"} if route.answer is None else schema(route.answer)
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": _PARAMETERS[name]}
                for name in _PARAMETER.findall(route.path)
            ),
            *(
                {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
                for name, text in route.query
            ),
        ],
        "responses": {
            "200": {"description": route.summary, "content": {content: {"schema": answer}}},
            "default": {
                "description": "A typed refusal",
                "content": {"application/json": {"schema": schema(m.ErrorAnswer)}},
            },
        },
    }
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema(route.body)}},
        }
    if route.who != "anyone":
        headers = [KEY_HEADER, TIME_HEADER, NONCE_HEADER, SIGNATURE_HEADER]
        if route.who in ("backbone", "relay"):
            headers.append(CERTIFICATE_HEADER)
        operation["security"] = [{header: [] for header in headers}]
    return operation
