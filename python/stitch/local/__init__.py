"""A pool of replicas as processes on this machine."""

from __future__ import annotations

from stitch.local.pool import LocalPool
from stitch.local.replica import LocalReplica

__all__ = ["LocalPool", "LocalReplica"]
