"""The replica's HTTP process: admission, labelling and proxying in front of one engine."""

from __future__ import annotations

from stitch.sidecar.config import SidecarConfig
from stitch.sidecar.server import SidecarServer, serve_sidecar

__all__ = ["SidecarConfig", "SidecarServer", "serve_sidecar"]
