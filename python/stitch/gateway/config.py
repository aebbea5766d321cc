"""Limits of a gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

from stitch.http.limits import ServerLimits, UpstreamLimits

__all__ = ["GatewayConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Limits of a gateway. Seconds, bytes and counts.

    server, replica: the client side and the replica side.
    wait_s_max: cap on waiting for a replica that will meet the constraint; also how long a
        request without its own `max_wait_ms` waits, if some replica is on its way there.
    retries_max: tries after the first, before the first byte went out.
    retry_s: a replica that failed a try is left out this long, unless it says otherwise.
    waiting_max: requests waiting at once; more is 429. in_flight_max: of one replica.
    response_bytes_max: a JSON or sized response is held whole up to this, so that a replica
        that dies can be replaced without the client noticing.
    replicas_floor: `/health` is 200 once three quarters of this, rounded up, are ready.
    failures_max: consecutive failures after which a replica is left out until it answers.
    feed_silence_s: an event stream without a byte for this long counts as a failure.
    feed_backoff_s, feed_backoff_s_max: first and longest pause between connections to it.
    stale_s_max: how long the last known members are kept while discovery gives none.
    affinity_load_max: running plus queued requests up to which a replica keeps its keys.
    affinity_keys_max, affinity_ttl_s, affinity_replicas_max: bounds of the key table.
    """

    server: ServerLimits = field(default_factory=ServerLimits)
    replica: UpstreamLimits = field(
        default_factory=lambda: UpstreamLimits(connect_timeout_s=2.0, idle_s=30.0)
    )
    wait_s_max: float = 30.0
    retries_max: int = 3
    retry_s: float = 0.5
    waiting_max: int = 1024
    in_flight_max: int = 1024
    response_bytes_max: int = 16 * 1024 * 1024
    replicas_floor: int = 1
    failures_max: int = 3
    feed_silence_s: float = 20.0
    feed_backoff_s: float = 0.05
    feed_backoff_s_max: float = 2.0
    stale_s_max: float = 60.0
    affinity_load_max: int = 32
    affinity_keys_max: int = 65_536
    affinity_ttl_s: float = 4 * 3600.0
    affinity_replicas_max: int = 10
    close_s: float = 5.0
