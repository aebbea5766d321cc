"""What a rollout script calls: generations with a version constraint, sync and async."""

from __future__ import annotations

from stitch.client.asynchronous import AsyncClient, ClientConfig, ClientStats
from stitch.client.completion import Chunk, Completion
from stitch.client.failure import Interrupted
from stitch.client.synchronous import Client

__all__ = [
    "AsyncClient",
    "Chunk",
    "Client",
    "ClientConfig",
    "ClientStats",
    "Completion",
    "Interrupted",
]
