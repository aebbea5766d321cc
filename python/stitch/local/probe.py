"""Blocking look at a local HTTP server's JSON route, for a pool that waits for its processes."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

__all__ = ["probe"]


def probe(url: str, path: str, *, deadline_s: float = 2.0) -> tuple[int, Any] | None:
    """Status and decoded JSON (None if it is none) of `GET url/path`; None without an answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port or 80, timeout=deadline_s
    )
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        answer = connection.getresponse()
        data = answer.read()
        try:
            return answer.status, json.loads(data)
        except ValueError:
            return answer.status, None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
