"""Stitch: the versioned control plane for disaggregated reinforcement learning.

Public names load on first use, so `import stitch` stays light: no torch, no HTTP, no store.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> module that defines it
_EXPORTS = {
    "open_store": "stitch.stores",
    "Publisher": "stitch.publisher",
    "Publication": "stitch.publisher",
    "Client": "stitch.client",
    "LocalPool": "stitch.local",
    "at_least": "stitch.types",
    "exactly": "stitch.types",
    "lag": "stitch.types",
    "Ref": "stitch.types",
    "Constraint": "stitch.types",
    "Span": "stitch.types",
    "ActivationMode": "stitch.types",
    "StitchError": "stitch.errors",
}
_MODULES = frozenset({"checksum", "delta", "errors", "format", "layout", "stores", "types"})

__all__ = [
    "ActivationMode",
    "Client",
    "Constraint",
    "LocalPool",
    "Publication",
    "Publisher",
    "Ref",
    "Span",
    "StitchError",
    "at_least",
    "exactly",
    "lag",
    "open_store",
]

if TYPE_CHECKING:
    from stitch.client import Client
    from stitch.errors import StitchError
    from stitch.local import LocalPool
    from stitch.publisher import Publication, Publisher
    from stitch.stores import open_store
    from stitch.types import ActivationMode, Constraint, Ref, Span, at_least, exactly, lag


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"stitch.{name}")
    raise AttributeError(f"module 'stitch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS, *_MODULES})
