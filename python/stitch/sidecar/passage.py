"""One proxied request on a sidecar, from its lease to its last byte.

However it ends, the generation is over before the lease is free: whole, aborted by its
request id when the client left or the engine broke off, or ended by the gate.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

import orjson

from stitch.admission import Lease
from stitch.env import Clock
from stitch.errors import EngineUnavailable, StitchError, Unsupported
from stitch.http.errors import error_body, retry_headers
from stitch.http.exchange import Exchange
from stitch.http.message import Request, Response
from stitch.http.relay import StreamTail, deliver, deliver_whole, error_event, held, request_head
from stitch.http.upstream import Upstream, UpstreamLost
from stitch.sidecar.config import SidecarConfig
from stitch.sidecar.labels import relabel_json, relabel_stream

__all__ = ["Passage", "Sidecar"]

log = logging.getLogger(__name__)


class Sidecar(Protocol):
    """What a passage needs of its sidecar."""

    config: SidecarConfig
    clock: Clock

    @property
    def upstream(self) -> Upstream: ...

    def count(self, name: str, labels: str = "") -> None: ...
    def spawn(self, work: Any, name: str) -> None: ...
    async def abort_generation(self, rid: str) -> None: ...
    def ended(self, lease: Lease, rids: tuple[str, ...]) -> None: ...
    def label_response(self, path: str, body: dict[str, Any], lease: Lease) -> None: ...


class Passage:
    """Runs one request upstream under a lease.

    rids: the ids to abort a generation by; none for a read-only route. labelled: the engine's
    responses already carry their labels, or the route has none.
    """

    def __init__(
        self,
        sidecar: Sidecar,
        request: Request,
        response: Response,
        lease: Lease,
        *,
        rids: tuple[str, ...],
        labelled: bool,
        extra: bytes,
    ) -> None:
        self._sidecar = sidecar
        self._request = request
        self._response = response
        self._lease = lease
        self._rids = rids
        self._labelled = labelled
        self._extra = extra
        self._exchange: Exchange | None = None
        self._tail: StreamTail | None = None
        self._settled = False
        self._task: asyncio.Task[Any] | None = None

    async def run(self, payload: bytes) -> None:
        """Send `payload` upstream and the response back. Frees the lease on every path.

        An engine lost before the first byte is answered with EngineUnavailable.
        """
        lease = self._lease
        self._task = asyncio.current_task()
        lease.on_abort = self._on_abort
        try:
            await self._pass(payload)
        except UpstreamLost as error:
            self._give_up()
            self._sidecar.count("stitch_sidecar_engine_lost_total")
            log.warning(
                "engine lost", extra={"path": self._request.path, "rids": self._rids, "why": error}
            )
            gone = EngineUnavailable(
                "the engine broke off before it answered; try again", **self._versions()
            )
            self._response.send_error(gone, headers=self._extra)
        except asyncio.CancelledError:
            assert self._task is not None
            if lease.error is not None and self._task.uncancel() == 0:
                await self._end_by_gate(lease.error)
                return
            self._sidecar.count("stitch_sidecar_client_gone_total")
            log.info(
                "client gone",
                extra={"path": self._request.path, "rids": self._rids, "status": 499},
            )
            self._give_up()
            raise
        finally:
            # No reference cycles are left behind: collecting them costs more than the request.
            self._task = lease.on_abort = None
            if self._exchange is None or self._exchange.done:
                self._settle()
            else:
                self._give_up()

    async def _pass(self, payload: bytes) -> None:
        request, sidecar = self._request, self._sidecar
        upstream = sidecar.upstream
        lines = request.lines if self._labelled else request.without(b"accept-encoding:")
        head = request_head(request, upstream.authority, lines, len(payload))
        exchange = await upstream.send(
            head, payload, bare=request.method == "HEAD", on_sent=self._sent
        )
        if b"\r\nx-stitch-" in exchange.head.lower():
            exchange.head = _without_labels(exchange.head)
        bytes_max = sidecar.config.response_bytes_max
        if self._labelled and deliver_whole(exchange, request, self._response, self._extra):
            return
        whole = exchange.done or await held(exchange, bytes_max)
        if not self._labelled and exchange.status == 200:
            if exchange.event_stream:
                await self._pass_stream(exchange)
                return
            if exchange.json:
                if not whole:
                    raise Unsupported(
                        f"the response passes {bytes_max} bytes and can't be labelled"
                    )
                body = relabel_json(exchange.take(), self._stamp)
                self._response.send_raw(exchange.head + self._extra, body)
                return
        cut = await deliver(
            exchange,
            request,
            self._response,
            extra=self._extra,
            cut_event=self._cut_event,
            tail=self._stream_tail(),
        )
        if cut is not None:
            self._sidecar.count("stitch_sidecar_engine_lost_total")
            self._give_up()

    async def _pass_stream(self, exchange: Exchange) -> None:
        """An event stream whose events are labelled here, one by one."""
        response = self._response
        response.feed_from(exchange)
        response.begin(exchange.head + self._extra, None)
        try:
            await exchange.pipe(relabel_stream(self._stream_tail().write, self._stamp))
        except StitchError as error:
            self._stream_tail().end_with(self._cut_event(error))
            self._give_up()
            return
        response.end()

    async def _end_by_gate(self, error: StitchError) -> None:
        """The gate took the lease back: end the generation, answer with what it made so far."""
        if self._was_done():
            return
        self._sidecar.count("stitch_sidecar_gate_aborts_total")
        for rid in self._rids:
            await self._sidecar.abort_generation(rid)
        exchange, response = self._exchange, self._response
        response.feed_from(None)
        rest = b""
        if exchange is not None:
            exchange.resume()
            try:
                async with self._sidecar.clock.timeout(self._sidecar.config.partial_s):
                    await exchange.head_arrived()
                    await exchange.gather(self._sidecar.config.response_bytes_max)
            except (StitchError, TimeoutError):
                log.info("no partial output", extra={"rids": self._rids})
            rest = exchange.take()
            exchange.cancel()
        if not response.started:
            partial = _json_or_none(rest) if exchange and exchange.status == 200 else None
            body = error_body(error, partial=partial, **self._versions())
            response.send(error.http_status, body, headers=retry_headers(error) + self._extra)
        elif exchange is not None and exchange.event_stream:
            before, _, _ = rest.partition(b"data: [DONE]")
            if before:
                self._stream_tail().write(before)
            self._stream_tail().end_with(error_event(error, **self._versions()))
        else:
            response.abort()
        self._settle()

    def _was_done(self) -> bool:
        """Whether the generation had ended before the gate's word came; then answer with it."""
        exchange, response = self._exchange, self._response
        if exchange is None or not exchange.done:
            return False
        if response.started:
            self._stream_tail().write(exchange.take())
            response.end()
            return True
        return self._labelled and deliver_whole(exchange, self._request, response, self._extra)

    def _on_abort(self, error: StitchError) -> None:
        """The gate ends the lease: interrupt whatever this request waits for."""
        if not self._settled and self._task is not None:
            self._task.cancel()

    def _stream_tail(self) -> StreamTail:
        if self._tail is None:
            self._tail = StreamTail(self._response)
        return self._tail

    def _sent(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def _stamp(self, body: dict[str, Any]) -> None:
        self._sidecar.label_response(self._request.path, body, self._lease)

    def _cut_event(self, error: StitchError) -> bytes:
        gone = EngineUnavailable("the engine broke off in the middle of the answer; try again")
        return error_event(gone, **self._versions())

    def _versions(self) -> dict[str, Any]:
        ref = self._lease.label.ref
        return {"weight_run_id": ref.run_id, "weight_version_admitted": ref.version}

    def _settle(self) -> None:
        """The generation is over: free the lease."""
        if not self._settled:
            self._settled = True
            self._sidecar.ended(self._lease, self._rids)

    def _give_up(self) -> None:
        """Cut the exchange, end the generation, and only then free the lease."""
        if self._settled:
            return
        self._settled = True
        if self._exchange is not None:
            self._exchange.cancel()
        self._sidecar.spawn(self._abort_then_release(), "abort-generation")

    async def _abort_then_release(self) -> None:
        try:
            for rid in self._rids:
                await self._sidecar.abort_generation(rid)
        finally:
            self._sidecar.ended(self._lease, self._rids)


def _without_labels(head: bytes) -> bytes:
    """The head less `x-stitch-…`: labels in headers are the sidecar's alone to give."""
    lines = head.split(b"\r\n")
    return b"\r\n".join(line for line in lines if not line.lower().startswith(b"x-stitch-"))


def _json_or_none(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
