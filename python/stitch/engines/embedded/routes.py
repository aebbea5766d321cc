"""Every route of the embedded engine's server, and how a sidecar treats it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from stitch.engines.base import RouteKind

__all__ = ["ROUTES", "classify"]

_SAMPLING = ("/generate", "/v1/completions", "/v1/chat/completions")
_READ_ONLY = (
    "/health",
    "/v1/models",
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
    "/metrics",
)
_CONTROL = (
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/abort_request",
    "/update_weights_from_disk",
    "/stitch/rank",
    "/stitch/pause",
    "/stitch/resume",
)
_CONTROL_READS = ("/flush_cache", "/stitch/describe", "/stitch/health")

ROUTES: Final[Mapping[tuple[str, str], RouteKind]] = MappingProxyType(
    {
        **{("POST", path): RouteKind.SAMPLING for path in _SAMPLING},
        **{("GET", path): RouteKind.READ_ONLY for path in _READ_ONLY},
        **{("POST", path): RouteKind.BLOCKED for path in _CONTROL},
        **{("GET", path): RouteKind.BLOCKED for path in _CONTROL_READS},
    }
)


def classify(method: str, path: str) -> RouteKind:
    """The kind of one route; anything unlisted is blocked."""
    return ROUTES.get((method.upper(), path), RouteKind.BLOCKED)
