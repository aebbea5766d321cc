"""A replica without weights, for tests of HTTP: a scripted engine server, engine and view.

The engine server is a real socket server whose answers follow the request's `fake` object;
`python -m stitch.testing.http_fakes` runs one whole replica as a process that tests may kill.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson

from stitch.admission import AdmissionGate, GateConfig
from stitch.engines.base import (
    EngineCapabilities,
    EngineDescription,
    Health,
    RankChannel,
    RouteKind,
)
from stitch.env import Env
from stitch.errors import Closed
from stitch.reconciler.base import ReplicaReport
from stitch.sidecar import SidecarConfig, SidecarServer, serve_sidecar
from stitch.types import ActivationMode, GateState, Label, Phase, Ref, ReplicaState

__all__ = [
    "FakeEngine",
    "FakeEngineServer",
    "FakeReplica",
    "FakeView",
    "Seen",
    "fake_replica",
]

SAMPLING = ("/generate", "/v1/completions", "/v1/chat/completions")
READ_ONLY = ("/v1/models", "/model_info", "/raw")


class Seen:
    """One request as the engine server received it."""

    def __init__(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body

    @property
    def json(self) -> dict[str, Any]:
        """The body as JSON."""
        parsed: dict[str, Any] = orjson.loads(self.body or b"{}")
        return parsed


class FakeEngineServer:
    """Answers on a real socket. A sampling request's `fake` object scripts its answer:

    kind: json (default), chunked, close, gzip, sse, no_content, die_before, die_in_head,
        die_in_body, die_in_stream, bad_status, silent.
    delay_s: before the head. gap_s: between stream events. tokens: stream events.
    size: bytes of text. split: whether the head and body come in many small writes.
    """

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.aborted: list[str] = []
        self.running: set[str] = set()
        self.label: Label | None = None
        self.connections = 0
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._stops: dict[str, asyncio.Event] = {}
        self._server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> int:
        """Listen on a port of the loopback."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self.port

    async def close(self) -> None:
        """Stop at once, as a killed process would."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    def abort(self, rid: str) -> None:
        """End one generation."""
        self.aborted.append(rid)
        if rid in self._stops:
            self._stops[rid].set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                seen = await _read_request(reader)
                self.seen.append(seen)
                if not await self._answer(seen, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except asyncio.CancelledError:
            return
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        path = seen.target.partition("?")[0]
        if path == "/metrics":
            return _whole(writer, b"# TYPE fake counter\nfake 1\n", b"text/plain")
        if path not in SAMPLING:
            return _whole(writer, b"raw:" + seen.target.encode(), b"application/x-raw")
        script = dict(seen.json.get("fake") or {})
        rid = str(seen.json.get("rid"))
        self.running.add(rid)
        self._stops[rid] = asyncio.Event()
        try:
            await self._pause(rid, float(script.get("delay_s", 0)))
            return await self._generate(path, rid, script, writer)
        finally:
            self.running.discard(rid)
            self._stops.pop(rid, None)

    async def _pause(self, rid: str, seconds: float) -> bool:
        """Wait; True if the generation was aborted meanwhile."""
        if seconds <= 0:
            return self._stops[rid].is_set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stops[rid].wait()
                return True
        return False

    async def _generate(
        self, path: str, rid: str, script: dict[str, Any], writer: asyncio.StreamWriter
    ) -> bool:
        kind = str(script.get("kind", "json"))
        if kind == "silent":
            await self._pause(rid, 3600)
        if kind == "die_before":
            writer.transport.abort()
            return False
        if kind in ("sse", "die_in_stream"):
            return await self._stream(rid, script, writer)
        body = orjson.dumps(self._result(path, rid, "x" * int(script.get("size", 10))))
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Engine: fake\r\n"
        sized = b"Content-Length: %d\r\n\r\n" % len(body)
        if kind == "die_in_head":
            writer.write(head)
        elif kind == "die_in_body":
            writer.write(head + sized + body[: len(body) // 2])
        elif kind == "bad_status":
            writer.write(b"HTTP/1.1 banana\r\n\r\n")
        elif kind == "close":
            writer.write(head.replace(b"1.1", b"1.0", 1) + b"\r\n" + body)
        elif kind == "no_content":
            writer.write(b"HTTP/1.1 204 No Content\r\nX-Engine: fake\r\n\r\n")
            return True
        elif kind == "gzip":
            packed = gzip.compress(body, mtime=0)
            head += b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
            await _write(writer, head + packed, script)
            return True
        elif kind == "chunked":
            head += b"Transfer-Encoding: chunked\r\nKeep-Alive: timeout=5\r\n\r\n"
            await _write(writer, head + _chunks(body, 1000) + b"0\r\n\r\n", script)
            return True
        else:
            await _write(writer, head + sized + body, script)
            return True
        await writer.drain()
        return False

    async def _stream(self, rid: str, script: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        tokens = int(script.get("tokens", 3))
        reason = "length"
        for index in range(tokens):
            if await self._pause(rid, float(script.get("gap_s", 0))):
                reason = "abort"
                break
            event = b"data: %b\n\n" % orjson.dumps({"text": "t" * (index + 1), "index": index})
            if script["kind"] == "die_in_stream" and index == tokens - 1:
                writer.write(b"%x\r\n%b" % (len(event), event[:9]))
                await writer.drain()
                return False
            writer.write(_chunks(event, 65536))
            await writer.drain()
        last = self._result("/generate", rid, "t" * tokens)
        last["meta_info"]["finish_reason"] = {"type": reason}
        tail = b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(last)
        writer.write(_chunks(tail, 65536) + b"0\r\n\r\n")
        await writer.drain()
        return True

    def _result(self, path: str, rid: str, text: str) -> dict[str, Any]:
        stopped = rid in self._stops and self._stops[rid].is_set()
        reason = {"type": "abort" if stopped else "length"}
        result: dict[str, Any] = {"text": text, "meta_info": {"id": rid, "finish_reason": reason}}
        if self.label is not None:
            result["meta_info"]["weight_version"] = str(self.label.ref.version)
        return result


class FakeEngine:
    """An Engine over a FakeEngineServer; weights and ranks do not exist."""

    def __init__(self, server: FakeEngineServer, *, final_responses: bool = True) -> None:
        self.server = server
        self.base_url = f"http://127.0.0.1:{server.port}"
        self.capabilities = EngineCapabilities(
            modes=frozenset(ActivationMode),
            destinations=frozenset({"cpu"}),
            spans=final_responses,
            final_responses=final_responses,
            keyed_cache=True,
        )

    @property
    def ranks(self) -> RankChannel:
        raise AssertionError("this engine has no ranks")

    def route(self, method: str, path: str) -> RouteKind:
        if method == "POST" and path in SAMPLING:
            return RouteKind.SAMPLING
        if method in ("GET", "HEAD", "PUT") and path in READ_ONLY:
            return RouteKind.READ_ONLY
        return RouteKind.BLOCKED

    async def describe(self) -> EngineDescription:
        return EngineDescription("fake", "0", "boot", "/model", "Fake", 1)

    async def health(self) -> Health:
        return Health.HEALTHY

    async def pause(self, mode: ActivationMode) -> None: ...

    async def resume(self, *, recompute: bool) -> float:
        return 0.0

    async def flush(self) -> bool:
        return True

    async def abort(self, rid: str) -> None:
        self.server.abort(rid)

    def stamp_request(self, path: str, body: dict[str, Any], *, rid: str, label: Label) -> None:
        body["rid"] = rid
        body["extra_key"] = f"{label.ref}#{label.epoch}"

    def stamp_response(self, path: str, body: dict[str, Any], *, admitted: Label) -> None:
        meta = body.setdefault("meta_info", {})
        meta["weight_version"] = str(admitted.ref.version)
        meta["weight_version_start"] = meta["weight_version_end"] = admitted.ref.version


class FakeView:
    """A ReplicaView whose state tests set directly."""

    def __init__(
        self,
        engine: FakeEngine,
        *,
        env: Env,
        replica_id: str = "replica-0",
        incarnation: str = "life-1",
        gate_config: GateConfig | None = None,
    ) -> None:
        self.engine = engine
        self.gate = AdmissionGate(env, gate_config)
        self.gate.on_change = self.changed
        self.replica_id = replica_id
        self.incarnation = incarnation
        self.state = ReplicaState.BOOTING
        self.latest: Ref | None = None
        self.reason: str | None = None
        self.wakes = 0
        self._seq = 0
        self._changed = asyncio.Event()
        self._epoch = 0

    def serve(self, ref: Ref | None, *, latest: Ref | None = None) -> None:
        """Serve `ref`, as after an activation; the gate ends up open."""
        self._epoch += 1
        label = None if ref is None else Label(ref, self._epoch)
        self.engine.server.label = label
        self.state = ReplicaState.READY if ref is not None else ReplicaState.UNKNOWN
        self.latest = latest or ref or self.latest
        self.gate.see_latest(self.latest)
        self.gate.open(label)
        self.changed()

    def see(self, latest: Ref) -> None:
        """Learn of a newer pointer."""
        self.latest = latest
        self.gate.see_latest(latest)
        self.changed()

    def changed(self) -> None:
        self._seq += 1
        self._changed.set()

    def report(self) -> ReplicaReport:
        served, latest = self.gate.served, self.latest
        lag = None
        if served is not None and latest is not None and served.run_id == latest.run_id:
            lag = latest.version - served.version
        closed = self.gate.state is GateState.CLOSED
        return ReplicaReport(
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            seq=self._seq,
            state=self.state,
            phase=Phase.ACTIVATING if closed else Phase.IDLE,
            gate=self.gate.state,
            served=served,
            latest=latest,
            lag=lag,
            running=self.gate.running,
            waiting=self.gate.waiting,
            reason=self.reason,
            gate_closed_s=None,
            swap_s=None,
            recompute_s=None,
        )

    async def reports(self) -> AsyncIterator[ReplicaReport]:
        while True:
            self._changed.clear()
            yield self.report()
            await self._changed.wait()

    def server_info(self) -> dict[str, Any]:
        ready, reason = self.health()
        served = self.gate.served
        return {
            "ready": ready,
            "applied": None if served is None else str(served),
            "sync_state": "IDLE",
            "reason": reason,
            "run_id": None if served is None else served.run_id,
            "commit_mode": "recompute",
            "active_requests": self.gate.running,
            "update_destination_ready": True,
            "update_destination_error": None,
            "terminal_error": None,
            "metrics": {},
        }

    def health(self) -> tuple[bool, str | None]:
        if self.state is ReplicaState.READY:
            return True, None
        return False, self.reason or self.state.value.lower()

    def wake(self) -> None:
        self.wakes += 1

    def metrics(self) -> str:
        return f"# TYPE stitch_replica_running gauge\nstitch_replica_running {self.gate.running}\n"

    async def drain(self, deadline_s: float) -> None:
        self.state = ReplicaState.DRAINING
        leaving = Closed("this replica is leaving; try another")
        self.gate.refuse(leaving)
        self.changed()
        if not await self.gate.drained(deadline_s):
            self.gate.abort_all(leaving)


@dataclass(slots=True)
class FakeReplica:
    """A running replica: engine server, view and sidecar."""

    server: FakeEngineServer
    view: FakeView
    sidecar: SidecarServer
    url: str


@contextlib.asynccontextmanager
async def fake_replica(
    *,
    served: Ref | None = Ref("run-a", 1),  # noqa: B008 - frozen
    replica_id: str = "replica-0",
    port: int = 0,
    final_responses: bool = True,
    config: SidecarConfig | None = None,
    gate_config: GateConfig | None = None,
    env: Env | None = None,
) -> AsyncIterator[FakeReplica]:
    """Run one replica in this event loop."""
    env = env or Env()
    server = FakeEngineServer()
    await server.start()
    engine = FakeEngine(server, final_responses=final_responses)
    view = FakeView(engine, env=env, replica_id=replica_id, gate_config=gate_config)
    if served is not None:
        view.serve(served)
    sidecar = await serve_sidecar(view, port=port, config=config, env=env)
    try:
        yield FakeReplica(server, view, sidecar, f"http://127.0.0.1:{sidecar.port}")
    finally:
        await server.close()
        await sidecar.close()


def _whole(writer: asyncio.StreamWriter, body: bytes, content_type: bytes) -> bool:
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
        % (content_type, len(body), body)
    )
    return True


def _chunks(data: bytes, size: int) -> bytes:
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


async def _write(writer: asyncio.StreamWriter, data: bytes, script: dict[str, Any]) -> None:
    step = 7 if script.get("split") else len(data)
    for at in range(0, len(data), step):
        writer.write(data[at : at + step])
        if step == 7:
            await asyncio.sleep(0)
    await writer.drain()


async def _read_request(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *rest = head.split("\r\n")
    method, target, _ = line.split(" ", 2)
    headers = {}
    for item in rest:
        name, _, value = item.partition(": ")
        if name:
            headers[name.lower()] = value
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Seen(method, target, headers, body)


async def _run(options: argparse.Namespace) -> None:
    served = Ref(options.run_id, options.version)
    async with fake_replica(
        served=served, replica_id=options.replica_id, port=options.port
    ) as replica:
        sys.stdout.write(f"listening {replica.url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


def main() -> None:
    """Run one fake replica until killed."""
    import uvloop

    parser = argparse.ArgumentParser(description="a replica without weights, for HTTP tests")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--run-id", default="run-a")
    parser.add_argument("--version", type=int, default=1)
    parser.add_argument("--replica-id", default="replica-0")
    uvloop.run(_run(parser.parse_args(sys.argv[1:])))


if __name__ == "__main__":
    main()
