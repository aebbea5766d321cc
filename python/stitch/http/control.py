"""The small table of routes that a server answers by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from stitch.http import HTTP_PROTOCOL
from stitch.http.connection import Handler
from stitch.http.errors import MethodNotAllowed
from stitch.http.message import Request, Response

__all__ = ["Routes", "send_json"]

_PROTOCOL_LINE = b"x-stitch-protocol: %d\r\n" % HTTP_PROTOCOL


class Routes:
    """Exact paths to handlers, by method. HEAD is answered where GET is."""

    def __init__(self, table: Mapping[tuple[str, str], Handler]) -> None:
        self._paths: dict[str, dict[str, Handler]] = {}
        for (method, path), handler in table.items():
            self._paths.setdefault(path, {})[method] = handler

    def find(self, request: Request) -> Handler | None:
        """The handler, or None if the path is not in the table.

        Raises: MethodNotAllowed for a known path with another method.
        """
        methods = self._paths.get(request.path)
        if methods is None:
            return None
        method = "GET" if request.method == "HEAD" else request.method
        handler = methods.get(method)
        if handler is None:
            raise MethodNotAllowed(
                f"{request.path} answers {', '.join(sorted(methods))}, not {request.method}"
            )
        return handler


def send_json(response: Response, status: int, body: Any, *, headers: bytes = b"") -> None:
    """A JSON response of a control route; it carries the protocol number."""
    data = orjson.dumps(body, default=str)
    response.send(status, data, headers=_PROTOCOL_LINE + headers)
