"""The published contract: schemas are current and sound, and live answers obey them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import BaseModel, ValidationError

from stitch.admission import GateConfig
from stitch.env import Env
from stitch.gateway import GatewayServer, serve_gateway
from stitch.http import documents as d
from stitch.http.schemas import contract_schemas
from stitch.pools import StaticPool
from stitch.testing.http_fakes import FakeReplica, fake_replica
from stitch.types import Label, Ref

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.parametrize("name", sorted(contract_schemas()))
def test_published_schemas_are_current(name: str) -> None:
    assert (DOCS / "schemas" / name).read_text() == contract_schemas()[name]


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def resolve(document: Any, reference: str) -> Any:
    node = document
    for part in reference.removeprefix("#/").split("/"):
        node = node[part]
    return node


@pytest.mark.parametrize("name", sorted(contract_schemas()))
def test_schemas_are_sound(name: str) -> None:
    document = json.loads(contract_schemas()[name])
    found = list(references(document))
    for reference in found:
        assert reference.startswith("#/")
        assert isinstance(resolve(document, reference), dict)

    def patterns(node: Any) -> None:
        for value in node.values() if isinstance(node, dict) else node:
            if isinstance(value, dict | list):
                patterns(value)
        if isinstance(node, dict) and isinstance(node.get("pattern"), str):
            re.compile(node["pattern"])

    patterns(document)


def test_the_description_names_every_route() -> None:
    described = json.loads(contract_schemas()["http.openapi.json"])["paths"]
    assert set(described) == {
        "/generate", "/v1/completions", "/v1/chat/completions", "/health", "/server_info",
        "/wake", "/events", "/metrics", "/status",
    }  # fmt: skip
    for item in described.values():
        for operation in item.values():
            assert "200" in operation["responses"]
            assert operation["summary"]


def test_the_page_names_every_error_code_and_field() -> None:
    page = (DOCS / "http-contract.md").read_text()
    from stitch import errors
    from stitch.http import errors as http_errors

    served = [
        cls
        for module in (errors, http_errors)
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, errors.StitchError)
    ]
    offline = {"StitchError", "Conflict", "CorruptData", "NotVisibleYet"}
    for cls in served:
        if cls.code not in offline:
            assert f"`{cls.code}`" in page, cls.code
    for model in (d.WeightVersion, d.ReplicaEvent, d.ServerInfo, d.GatewayStatus, d.SpanDocument):
        for field in model.model_fields:
            assert f"`{field}`" in page, f"{model.__name__}.{field}"


def test_examples_on_the_page_are_json() -> None:
    page = (DOCS / "http-contract.md").read_text()
    examples = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert len(examples) >= 5
    for example in examples:
        json.loads(example)


@pytest.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    gate = GateConfig(gate_wait_s=0.1, drain_deadline_s=0.05, defer_count_max=0)
    async with fake_replica(served=Ref("run-a", 5), gate_config=gate) as running:
        yield running


@pytest.fixture
async def gateway(replica: FakeReplica) -> AsyncIterator[GatewayServer]:
    server = await serve_gateway(StaticPool([replica.url], env=Env()), env=Env())
    async with asyncio.timeout(5):
        while not server.roster.ready:
            await asyncio.sleep(0.005)
    yield server
    await server.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture(params=["sidecar", "gateway"])
def url(request: Any, replica: FakeReplica, gateway: GatewayServer) -> str:
    return replica.url if request.param == "sidecar" else f"http://127.0.0.1:{gateway.port}"


async def fetch(
    http: aiohttp.ClientSession, method: str, url: str, body: Any = None
) -> tuple[int, Any]:
    async with http.request(method, url, json=body) as answer:
        assert answer.headers["Content-Type"] == "application/json"
        return answer.status, await answer.json()


async def first_event(http: aiohttp.ClientSession, url: str) -> Any:
    async with http.get(url + "/events") as answer:
        await answer.content.readuntil(b"data: ")
        return json.loads(await answer.content.readline())


async def test_control_documents(http, replica, gateway) -> None:
    sidecar_url, gateway_url = replica.url, f"http://127.0.0.1:{gateway.port}"
    d.ServerInfo.model_validate((await fetch(http, "GET", sidecar_url + "/server_info"))[1])
    d.ServerInfo.model_validate((await fetch(http, "POST", sidecar_url + "/wake"))[1])
    d.ReplicaEvent.model_validate(await first_event(http, sidecar_url))
    d.GatewayInfo.model_validate((await fetch(http, "GET", gateway_url + "/server_info"))[1])
    d.Woken.model_validate((await fetch(http, "POST", gateway_url + "/wake"))[1])
    for document in (
        (await fetch(http, "GET", gateway_url + "/status"))[1],
        await first_event(http, gateway_url),
    ):
        status = d.GatewayStatus.model_validate(document)
        assert status.members[0].report is not None


async def test_health(http, url, replica, gateway) -> None:
    status, body = await fetch(http, "GET", url + "/health")
    assert (status, d.Health.model_validate(body).ready) == (200, True)
    replica.view.serve(None)
    async with asyncio.timeout(5):
        while gateway.roster.ready:
            await asyncio.sleep(0.005)
    status, body = await fetch(http, "GET", url + "/health")
    assert (status, d.Health.model_validate(body).ready) == (503, False)


@pytest.mark.parametrize(
    ("path", "body", "status", "model"),
    [
        ("/generate", {"weight_version": {"min_version": 9}}, 409, d.NotReadyBody),
        ("/generate", {"weight_version": {"exact_version": 1}}, 409, d.NotReadyBody),
        ("/generate", {"weight_version": {"run_id": "other"}}, 409, d.NotReadyBody),
        ("/generate", {"weight_version": {"x": 9}}, 400, d.ErrorBody),
        ("/generate", {"weight_version": 9}, 400, d.ErrorBody),
        ("/generate", {"rid": 9}, 400, d.ErrorBody),
        ("/flush_cache", {}, 403, d.ErrorBody),
        ("/wake/x", {}, 403, d.ErrorBody),
        ("/health", {}, 405, d.ErrorBody),
    ],
)
async def test_errors(
    http: Any, url: str, path: str, body: Any, status: int, model: type[BaseModel]
) -> None:
    found, answer = await fetch(http, "POST", url + path, body)
    assert found == status
    model.model_validate(answer)


async def test_closed_and_lost_engines(http, url, replica) -> None:
    await replica.view.gate.close(everything=True)
    status, body = await fetch(
        http, "POST", url + "/generate", {"weight_version": {"max_wait_ms": 0}}
    )
    assert status == 503
    d.ErrorBody.model_validate(body)
    replica.view.gate.open(Label(Ref("run-a", 5), 2))
    async with http.post(
        url + "/generate", json={"fake": {"kind": "die_in_stream", "gap_s": 0.02}}
    ) as answer:
        data = await answer.read()
    event = d.ErrorEvent.model_validate(json.loads(data.rstrip().split(b"\n\n")[-1][6:]))
    assert event.error.weight_version_admitted == 5
    assert event.error.status == 503
    await replica.server.close()
    status, body = await fetch(http, "POST", url + "/generate", {})
    assert (status, d.ErrorBody.model_validate(body).error.code) == (503, "EngineUnavailable")


async def test_an_aborted_generation(http, replica) -> None:
    body = {"weight_version": {"exact_version": 5}, "rid": "r", "fake": {"delay_s": 30}}
    call = asyncio.create_task(fetch(http, "POST", replica.url + "/generate", body))
    async with asyncio.timeout(5):
        while "r" not in replica.server.running:
            await asyncio.sleep(0.005)
    await replica.view.gate.close(everything=False)
    status, answer = await call
    assert status == 503
    d.AbortedBody.model_validate(answer)


def test_the_models_can_refuse() -> None:
    with pytest.raises(ValidationError):
        d.WeightVersion.model_validate({"min_version": -1})
    with pytest.raises(ValidationError):
        d.Health.model_validate({"ready": True, "extra": 1})
