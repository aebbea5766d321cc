"""Limits of a sidecar."""

from __future__ import annotations

from dataclasses import dataclass, field

from stitch.http.limits import ServerLimits, UpstreamLimits

__all__ = ["SidecarConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarConfig:
    """Limits of a sidecar. Seconds and bytes.

    server, engine: the client side and the engine side.
    wait_s_max: cap on a request's own `max_wait_ms`.
    response_bytes_max: a JSON or sized response is held whole up to this, so that an engine
        that breaks off gives an error instead of half an answer; a larger one streams.
    abort_s: bound on telling the engine to end a generation.
    partial_s: bound on waiting for the partial output of a generation the gate ended.
    events_keepalive_s: between two comments of a quiet event stream.
    metrics_s: bound on the engine's metrics page.
    close_s: how long running requests may take once the server stops.
    """

    server: ServerLimits = field(default_factory=ServerLimits)
    engine: UpstreamLimits = field(default_factory=UpstreamLimits)
    wait_s_max: float = 120.0
    response_bytes_max: int = 16 * 1024 * 1024
    abort_s: float = 5.0
    partial_s: float = 3.0
    events_keepalive_s: float = 5.0
    metrics_s: float = 2.0
    close_s: float = 5.0
