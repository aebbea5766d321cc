"""The hot path that sidecar and gateway share: parsing, proxying, streaming, wire errors.

A plain asyncio protocol over httptools. Requests are read whole (bounded), response bodies
pass through unparsed. `docs/http-contract.md` is the contract.
"""

from __future__ import annotations

from typing import Final

__all__ = ["HTTP_PROTOCOL"]

# What sidecars, gateways and clients negotiate on; grows only when an old peer would misread.
HTTP_PROTOCOL: Final = 1
