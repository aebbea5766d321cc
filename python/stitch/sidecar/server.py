"""The sidecar: control routes, and everything else through the gate to the engine.

Default deny: what the engine's adapter does not list is 403.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final

import orjson

from stitch.admission import AdmissionGate, Lease
from stitch.engines.base import RouteKind
from stitch.env import Env
from stitch.errors import InvalidInput, NeverSatisfiable, NotReady, Overloaded, StitchError
from stitch.http import HTTP_PROTOCOL
from stitch.http.control import Routes, send_json
from stitch.http.errors import RouteBlocked
from stitch.http.events import EventStreams
from stitch.http.message import Request, Response
from stitch.http.metrics import PROMETHEUS, Counters
from stitch.http.relay import request_head
from stitch.http.server import HttpServer
from stitch.http.upstream import Upstream
from stitch.http.wire import FIELD, encode_json_object, parse_constraint, parse_json_object
from stitch.reconciler.base import ReplicaView
from stitch.sidecar.config import SidecarConfig
from stitch.sidecar.passage import Passage
from stitch.types import UNCONSTRAINED, Constraint, Label

__all__ = ["SidecarServer", "serve_sidecar"]

log = logging.getLogger(__name__)

_COUNTERS: Final = {
    "stitch_sidecar_requests_total": "Proxied requests by outcome.",
    "stitch_sidecar_engine_lost_total": "Requests whose engine broke off.",
    "stitch_sidecar_client_gone_total": "Requests whose client left.",
    "stitch_sidecar_gate_aborts_total": "Requests ended by the admission gate.",
}
_REFUSALS: Final = {NotReady: "not_ready", NeverSatisfiable: "never", Overloaded: "overloaded"}


async def serve_sidecar(
    view: ReplicaView,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    config: SidecarConfig | None = None,
    env: Env,
) -> SidecarServer:
    """Serve `view` over HTTP. Raises: InvalidInput if the port can't be bound."""
    server = SidecarServer(view, config=config or SidecarConfig(), env=env)
    await server.start(host, port)
    return server


class SidecarServer:
    """One replica's HTTP server. `port` is bound once started."""

    def __init__(self, view: ReplicaView, *, config: SidecarConfig, env: Env) -> None:
        self.config = config
        self.clock = env.clock
        self._env = env
        self._engine_url = view.engine.base_url
        self._upstream = Upstream(self._engine_url, limits=config.engine, env=env)
        self.port = 0
        self._view = view
        self._rid_prefix = env.random.nonce()
        self._rids = itertools.count(1)
        self._rids_used: set[str] = set()
        self._admitted: tuple[Label | None, bytes] = (None, b"")
        self._counters = Counters(_COUNTERS)
        self._streams = EventStreams(keepalive_s=config.events_keepalive_s, env=env)
        self._tasks: set[asyncio.Task[None]] = set()
        self._http = HttpServer(self.handle, limits=config.server, env=env)
        self._replica_line = b"x-stitch-replica: %b\r\n" % _header_value(view.report().replica_id)
        self._routes = Routes(
            {
                ("GET", "/health"): self._health,
                ("GET", "/server_info"): self._server_info,
                ("POST", "/wake"): self._wake,
                ("GET", "/events"): self._events,
                ("GET", "/metrics"): self._metrics,
            }
        )

    @property
    def gate(self) -> AdmissionGate:
        """The replica's gate."""
        return self._view.gate

    @property
    def upstream(self) -> Upstream:
        """Connections to the engine, wherever it is now."""
        url = self._view.engine.base_url
        if url != self._engine_url:
            log.info("engine moved", extra={"from": self._engine_url, "to": url})
            self.spawn(self._upstream.close(), "upstream-close")
            self._engine_url = url
            self._upstream = Upstream(url, limits=self.config.engine, env=self._env)
        return self._upstream

    async def start(self, host: str, port: int) -> None:
        """Bind and serve."""
        self.port = await self._http.start(host, port)

    async def drain(self, deadline_s: float) -> None:
        """Leave the pool: not ready at once, refuse retryably, let running requests end; close."""
        await self._view.drain(deadline_s)
        await self.close()

    async def close(self) -> None:
        """Stop serving; requests still running after `close_s` are cut."""
        self._streams.close()
        await self._http.close(self.config.close_s)
        await self._upstream.close()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self.config.abort_s + 1.0)

    async def handle(self, request: Request, response: Response) -> None:
        """Answer one request."""
        control = self._routes.find(request)
        if control is not None:
            await control(request, response)
            return
        kind = self._view.engine.route(request.method, request.path)
        if kind is RouteKind.BLOCKED:
            raise RouteBlocked(
                f"{request.method} {request.path} is not open to clients of this replica",
                path=request.path,
            )
        if kind is RouteKind.SAMPLING:
            await self._sample(request, response)
            return
        lease = await self._admit(UNCONSTRAINED)
        passage = Passage(
            self, request, response, lease, rids=(), labelled=True, extra=self._extra(lease)
        )
        await passage.run(request.body)
        self._counters.add("stitch_sidecar_requests_total", labels='outcome="passed"')

    # What a passage needs.

    def count(self, name: str, labels: str = "") -> None:
        """Count one."""
        self._counters.add(name, labels=labels)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` to its end whatever becomes of the request."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def abort_generation(self, rid: str) -> None:
        """End one generation; a dead engine has ended it already."""
        try:
            async with self.clock.timeout(self.config.abort_s):
                await self._view.engine.abort(rid)
        except (StitchError, OSError, TimeoutError) as error:
            log.info("abort not confirmed", extra={"rid": rid, "why": str(error)})

    def ended(self, lease: Lease, rids: tuple[str, ...]) -> None:
        """The generation is over: free its lease and its ids."""
        self.gate.release(lease)
        self._rids_used.difference_update(rids)

    def label_response(self, path: str, body: dict[str, Any], lease: Lease) -> None:
        """Let the adapter stamp one JSON body."""
        self._view.engine.stamp_response(path, body, admitted=lease.label)

    # Sampling.

    async def _sample(self, request: Request, response: Response) -> None:
        body = parse_json_object(request.body)
        constraint = parse_constraint(body.pop(FIELD, None), request.headers)
        rids = _client_rids(body) or (self._fresh_rid(),)
        self._reserve(rids)
        try:
            lease = await self._admit(constraint)
        except BaseException:
            self._rids_used.difference_update(rids)
            raise
        engine = self._view.engine
        try:
            rid = rids[0]
            batch = body.get("rid") if isinstance(body.get("rid"), list) else None
            engine.stamp_request(request.path, body, rid=rid, label=lease.label)
            if batch is not None:
                body["rid"] = batch
            payload = encode_json_object(body)
        except BaseException:
            self.ended(lease, rids)
            raise
        passage = Passage(
            self,
            request,
            response,
            lease,
            rids=rids,
            labelled=engine.capabilities.final_responses,
            extra=self._extra(lease),
        )
        await passage.run(payload)
        self._counters.add("stitch_sidecar_requests_total", labels='outcome="passed"')

    def _fresh_rid(self) -> str:
        while True:
            rid = f"{self._rid_prefix}-{next(self._rids):x}"
            if rid not in self._rids_used:
                return rid

    def _reserve(self, rids: tuple[str, ...]) -> None:
        """Two generations of one id can't be told apart: ending one would end the other."""
        taken = sorted(self._rids_used.intersection(rids))
        if taken:
            raise Overloaded(f"rid {taken[0]!r} is in use by a running request", param="rid")
        self._rids_used.update(rids)

    async def _admit(self, constraint: Constraint) -> Lease:
        if constraint.max_lag is not None:
            constraint = self._bound_lag(constraint)
        wait_s = None
        if constraint.max_wait_ms is not None:
            wait_s = min(constraint.max_wait_ms / 1000, self.config.wait_s_max)
        try:
            return await self.gate.admit(constraint, wait_s=wait_s)
        except StitchError as error:
            outcome = _REFUSALS.get(type(error), "refused")
            self.count("stitch_sidecar_requests_total", f'outcome="{outcome}"')
            if isinstance(error, NotReady | NeverSatisfiable):
                self._view.wake()
            raise

    def _bound_lag(self, constraint: Constraint) -> Constraint:
        """Turn `max_lag` into a minimum from the pointer as this replica knows it."""
        latest = self._view.report().latest
        lag = constraint.max_lag
        if latest is None or lag is None or constraint.exact_version is not None:
            return constraint
        if constraint.run_id not in (None, latest.run_id):
            return constraint
        return Constraint(
            min_version=max(constraint.min_version or 0, latest.version - lag),
            run_id=latest.run_id,
            max_lag=lag,
            max_wait_ms=constraint.max_wait_ms,
        )

    def _extra(self, lease: Lease) -> bytes:
        """The header lines for the label; made once for each."""
        label, lines = self._admitted
        if label is not lease.label:
            ref = lease.label.ref
            lines = b"x-stitch-version-admitted: %d\r\nx-stitch-run-id: %b\r\n%b" % (
                ref.version,
                ref.run_id.encode("latin-1"),
                self._replica_line,
            )
            self._admitted = (lease.label, lines)
        return lines

    # Control routes.

    async def _health(self, request: Request, response: Response) -> None:
        ready, reason = self._view.health()
        body = {"ready": True} if ready else {"ready": False, "reason": reason}
        send_json(response, 200 if ready else 503, body)

    async def _server_info(self, request: Request, response: Response) -> None:
        send_json(response, 200, self._info())

    async def _wake(self, request: Request, response: Response) -> None:
        self._view.wake()
        send_json(response, 200, self._info())

    def _info(self) -> dict[str, Any]:
        info = self._view.server_info()
        info.setdefault("protocol", HTTP_PROTOCOL)
        return info

    async def _events(self, request: Request, response: Response) -> None:
        await self._streams.serve(request, response, self._reports())

    async def _reports(self) -> AsyncIterator[tuple[str, bytes]]:
        reports = self._view.reports()
        try:
            async for report in reports:
                wire = report.to_wire()
                wire["protocol"] = HTTP_PROTOCOL
                yield report.event_id, orjson.dumps(wire)
        finally:
            aclose = getattr(reports, "aclose", None)
            if aclose is not None:
                await aclose()

    async def _metrics(self, request: Request, response: Response) -> None:
        page = await self._engine_metrics()
        own = self._view.metrics().encode() + self._counters.render().encode()
        if page and not page.endswith(b"\n"):
            page += b"\n"
        response.send(200, page + own, content_type=PROMETHEUS)

    async def _engine_metrics(self) -> bytes:
        probe = Request("GET", b"/metrics", [], {}, b"")
        exchange = None
        try:
            async with self.clock.timeout(self.config.metrics_s):
                exchange = await self.upstream.send(
                    request_head(probe, self.upstream.authority, [], 0)
                )
                whole = await exchange.gather(self.config.response_bytes_max)
                if whole and exchange.status == 200:
                    return exchange.take()
        except (StitchError, TimeoutError):
            log.debug("engine has no metrics now")
        if exchange is not None:
            exchange.cancel()
        return b""


def _header_value(replica_id: str) -> bytes:
    """The replica's name as it stands in every answer. Raises: InvalidInput."""
    if not re.fullmatch(r"[!-~]{1,256}", replica_id):
        raise InvalidInput(
            f"replica id {replica_id!r} must be 1 to 256 visible ASCII characters",
            param="replica_id",
        )
    return replica_id.encode("ascii")


def _client_rids(body: dict[str, Any]) -> tuple[str, ...]:
    """The request ids that the client chose; none if it left them to us."""
    rid = body.get("rid")
    if rid is None:
        body.pop("rid", None)
        return ()
    found = tuple(rid) if isinstance(rid, list) else (rid,)
    if not found or not all(isinstance(item, str) and 0 < len(item) <= 256 for item in found):
        raise InvalidInput(
            "rid must be a string, or a list of strings, of 1 to 256 characters", param="rid"
        )
    return found
