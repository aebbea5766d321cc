"""Limits of the HTTP server and of connections to upstreams. Seconds, bytes and counts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ServerLimits", "UpstreamLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What one server accepts.

    head_bytes_max, head_count_max, target_bytes_max: header block (431) and target (414).
    body_bytes_max: one request body (413). bodies_bytes_max: all bodies in memory (429).
    head_timeout_s: from a request's first byte to the end of its headers (408).
    body_idle_timeout_s, body_timeout_s: between two reads of a body, and for all of it (408).
    keepalive_s: an idle connection is closed after this long.
    write_stall_s: a client that takes no byte for this long counts as gone.
    write_buffer_bytes: above this much unsent data the upstream is not read.
    pipeline_max: requests of one connection queued before reading pauses.
    connections_max: more are refused. sweep_s: how often time limits are checked, and so
        how far off they may be.
    """

    head_bytes_max: int = 64 * 1024
    head_count_max: int = 200
    target_bytes_max: int = 16 * 1024
    body_bytes_max: int = 64 * 1024 * 1024
    bodies_bytes_max: int = 1024 * 1024 * 1024
    head_timeout_s: float = 10.0
    body_idle_timeout_s: float = 30.0
    body_timeout_s: float = 300.0
    keepalive_s: float = 75.0
    write_stall_s: float = 60.0
    write_buffer_bytes: int = 256 * 1024
    pipeline_max: int = 16
    connections_max: int = 16_384
    sweep_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamLimits:
    """How one upstream is used.

    connect_timeout_s: for the TCP connection. idle_s: an unused connection is closed after
    this long (below the usual five seconds of engine servers). silence_s: an exchange without
    a byte from the upstream for this long is lost. connections_max: at once; more is
    Overloaded. buffer_bytes: unread response data above which the upstream is not read.
    """

    connect_timeout_s: float = 5.0
    idle_s: float = 4.0
    silence_s: float = 1800.0
    connections_max: int = 4096
    head_bytes_max: int = 64 * 1024
    buffer_bytes: int = 256 * 1024
    sweep_s: float = 1.0
