"""Stores: where versions and the pointer live. `base.py` is the protocol, siblings are backends."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from stitch.env import Env
from stitch.errors import InvalidInput, Unsupported
from stitch.stores.base import Store

__all__ = ["Store", "open_store"]

# Schemes that belong to backends this build does not have, and the extra that will bring each.
_LATER: Final = {"s3": "s3", "modal-volume": "modal"}


def open_store(url: str, *, env: Env | None = None) -> Store:
    """Open a store by URL: `file:///path`, or a plain absolute path.

    Opening touches nothing; the root is made at the first write.

    Raises: Unsupported for a known scheme without a backend here; InvalidInput for anything else.
    """
    from stitch.stores.local import LocalStore

    if url.startswith("/"):
        return LocalStore(Path(url), env=env)
    parts = urlsplit(url)
    if parts.scheme in _LATER:
        raise Unsupported(
            f"{parts.scheme}:// stores come with the extra stitch-rl[{_LATER[parts.scheme]}] in a "
            "later release; use file:///path for now",
            url=url,
        )
    if parts.scheme != "file":
        raise InvalidInput(
            f"store URL {url!r} is not file:///path or an absolute path", param="store", url=url
        )
    if parts.query or parts.fragment or parts.netloc not in {"", "localhost"}:
        raise InvalidInput(
            f"store URL {url!r} must be file:///path, without host, query or fragment",
            param="store",
            url=url,
        )
    path = unquote(parts.path)
    if not path.startswith("/") or "\0" in path:
        raise InvalidInput(f"store URL {url!r} must hold an absolute path", param="store", url=url)
    return LocalStore(Path(path), env=env)
