"""The pool's front door: routes version-constrained requests to replicas that can serve them."""

from __future__ import annotations

from stitch.gateway.config import GatewayConfig
from stitch.gateway.server import GatewayServer, serve_gateway

__all__ = ["GatewayConfig", "GatewayServer", "serve_gateway"]
