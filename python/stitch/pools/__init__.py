"""Pools: who the replicas are. `base.py` is the protocol, each sibling one way to discover."""

from __future__ import annotations

from stitch.pools.base import Member, Pool
from stitch.pools.local import FilePool
from stitch.pools.static import StaticPool

__all__ = ["FilePool", "Member", "Pool", "StaticPool"]
