"""A replica without weights, for tests of HTTP: a scripted engine server, engine and view.

The engine server is a real socket server whose answers follow the request's `fake` object;
`python -m stitch.testing.http_fakes` runs one whole replica as a process that tests may kill.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

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
from stitch.testing.engine_server import SAMPLING, FakeEngineServer, Seen
from stitch.types import ActivationMode, GateState, Label, Phase, Ref, ReplicaState

__all__ = [
    "FakeEngine",
    "FakeEngineServer",
    "FakeReplica",
    "FakeView",
    "Seen",
    "fake_replica",
]

READ_ONLY = ("/v1/models", "/model_info", "/raw")


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
