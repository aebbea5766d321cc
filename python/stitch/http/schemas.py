"""The published schemas of the HTTP contract, made from `documents.py`.

`docs/schemas/` holds their printed form; a test says when it is out of date, and
`write_schemas(Path("docs/schemas"))` brings it up to date.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from stitch.http import HTTP_PROTOCOL
from stitch.http import documents as d

__all__ = ["contract_schemas", "write_schemas"]

_FILES: Final[dict[str, type[BaseModel]]] = {
    "http-error.schema.json": d.ErrorBody,
    "http-error-409.schema.json": d.NotReadyBody,
    "http-error-event.schema.json": d.ErrorEvent,
    "http-event.schema.json": d.ReplicaEvent,
    "http-labels.schema.json": d.LabelFields,
    "http-server-info.schema.json": d.ServerInfo,
    "http-status.schema.json": d.GatewayStatus,
    "http-weight-version.schema.json": d.WeightVersion,
}
_DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"


def contract_schemas() -> dict[str, str]:
    """File name -> text, for every published document and the OpenAPI description."""
    found = {
        name: {"$schema": _DRAFT, **model.model_json_schema()} for name, model in _FILES.items()
    }
    found["http.openapi.json"] = _openapi()
    return {
        name: json.dumps(_plain(schema), indent=2, sort_keys=True) + "\n"
        for name, schema in found.items()
    }


def _plain(schema: Any) -> Any:
    """Without defaults: a key that may be absent has no value when it is."""
    if isinstance(schema, dict):
        return {key: _plain(value) for key, value in schema.items() if key != "default"}
    return [_plain(item) for item in schema] if isinstance(schema, list) else schema


def write_schemas(directory: Path) -> None:
    """Write every schema into `directory`."""
    for name, text in contract_schemas().items():
        (directory / name).write_text(text, encoding="utf-8")


_MODELS: Final[Sequence[type[BaseModel]]] = (
    d.AbortedBody,
    d.ErrorBody,
    d.ErrorEvent,
    d.GatewayInfo,
    d.GatewayStatus,
    d.Health,
    d.LabelFields,
    d.NotReadyBody,
    d.ReplicaEvent,
    d.ServerInfo,
    d.WeightVersion,
    d.Woken,
)


def _openapi() -> dict[str, Any]:
    _, schema = models_json_schema(
        [(model, "validation") for model in _MODELS],
        ref_template="#/components/schemas/{model}",
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Stitch HTTP contract",
            "version": f"{HTTP_PROTOCOL}.0.0",
            "description": "Sidecar and gateway. docs/http-contract.md is the prose.",
        },
        "paths": _paths(),
        "components": {"schemas": schema["$defs"]},
    }


def _paths() -> dict[str, Any]:
    return {
        "/generate": {"post": _sampling("SGLang's native generation route")},
        "/v1/completions": {"post": _sampling("OpenAI completions")},
        "/v1/chat/completions": {"post": _sampling("OpenAI chat completions")},
        "/health": {
            "get": _operation(
                "Readiness, of a sidecar or gateway",
                {"200": _json("Ready", "Health"), "503": _json("Not ready, and why", "Health")},
            )
        },
        "/server_info": {
            "get": _operation(
                "State and last errors, of a sidecar; a summary, of a gateway",
                {"200": _either("State", "ServerInfo", "GatewayInfo")},
            )
        },
        "/wake": {
            "post": _operation(
                "A hint that the pointer moved", {"200": _either("Taken", "ServerInfo", "Woken")}
            )
        },
        "/events": {
            "get": _operation(
                "Server-sent events: full reports of a sidecar, full status of a gateway",
                {"200": _stream("Event data", "ReplicaEvent", "GatewayStatus")},
            )
        },
        "/metrics": {
            "get": _operation(
                "Prometheus text; a sidecar adds the engine's page",
                {"200": {"description": "Series", "content": {"text/plain": {"schema": _TEXT}}}},
            )
        },
        "/status": {
            "get": _operation(
                "Members, versions, states and load, of a gateway",
                {"200": _json("Status", "GatewayStatus")},
            )
        },
    }


_TEXT: Final = {"type": "string"}


def _sampling(summary: str) -> dict[str, Any]:
    headers = {
        "x-stitch-version-admitted": ("The version served at admission", {"type": "integer"}),
        "x-stitch-run-id": ("The run of that version", _TEXT),
        "x-stitch-replica": ("The replica that answered", _TEXT),
    }
    done = _json("The engine's response with its labels", "LabelFields")
    done["content"]["text/event-stream"] = {"schema": _ref("ErrorEvent")}
    done["headers"] = {
        name: {"description": text, "schema": schema} for name, (text, schema) in headers.items()
    }
    errors = {
        "400": _json("Malformed; `param` names the field", "ErrorBody"),
        "403": _json("RouteBlocked", "ErrorBody"),
        "408": _json("The request did not arrive in time", "ErrorBody"),
        "409": _json("The constraint is not met", "NotReadyBody"),
        "413": _json("The body passes the limit", "ErrorBody"),
        "429": _json("Overloaded", "ErrorBody"),
        "431": _json("The header block passes the limit", "ErrorBody"),
        "503": _either("Closed, EngineUnavailable, Unavailable", "ErrorBody", "AbortedBody"),
    }
    parameters = [
        _header("x-stitch-min-version", "At least this version", {"type": "integer"}),
        _header("x-stitch-exact-version", "Exactly this version", {"type": "integer"}),
        _header("x-stitch-affinity", "Prefer the replica that had this key before", _TEXT),
        _header("Modal-Session-ID", "As x-stitch-affinity", _TEXT),
    ]
    body = {
        "type": "object",
        "properties": {"weight_version": {"anyOf": [_ref("WeightVersion"), {"type": "null"}]}},
        "additionalProperties": True,
    }
    return {
        **_operation(summary, {"200": done, **errors}),
        "parameters": parameters,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
    }


def _operation(summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    return {"summary": summary, "responses": responses}


def _header(name: str, text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "description": text, "schema": schema}


def _ref(model: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model}"}


def _json(text: str, model: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": _ref(model)}}}


def _either(text: str, *models: str) -> dict[str, Any]:
    schema = {"anyOf": [_ref(model) for model in models]}
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _stream(text: str, *models: str) -> dict[str, Any]:
    schema = {"anyOf": [_ref(model) for model in models]}
    return {"description": text, "content": {"text/event-stream": {"schema": schema}}}
