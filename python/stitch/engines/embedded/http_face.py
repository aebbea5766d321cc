"""HTTP leaves: JSON in and out, errors, server-sent events."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from stitch.engines.embedded.generation import Progress
from stitch.engines.embedded.service import check_finish
from stitch.errors import InvalidInput, StitchError

__all__ = ["SseWriter", "error_body", "error_middleware", "json_response", "read_object"]

log = logging.getLogger(__name__)
RETRY_AFTER_MS = 1000


def json_response(body: Any, *, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(
        body=orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS),
        status=status,
        content_type="application/json",
    )


async def read_object(request: web.Request) -> dict[str, Any]:
    """The request's JSON object; an empty body is an empty object. Raises: InvalidInput."""
    raw = await request.read()
    if not raw:
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidInput("the body must be a JSON object")
    return body


def error_body(error: StitchError) -> dict[str, Any]:
    """The error object of the HTTP contract."""
    retry = RETRY_AFTER_MS if error.retryable else None
    return {"error": {**error.to_wire(), "retry_after_ms": retry}}


@web.middleware
async def error_middleware(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Failures become JSON; a bug becomes a 500 and a log entry, never a dead connection."""
    try:
        return await handler(request)
    except StitchError as error:
        response = json_response(error_body(error), status=error.http_status)
        if error.retryable:
            response.headers["Retry-After"] = str(RETRY_AFTER_MS // 1000)
        return response
    except web.HTTPException as error:
        wire = {
            "type": "HTTPError",
            "code": error.reason.replace(" ", ""),
            "message": f"{request.method} {request.path}: {error.reason}",
            "param": None,
            "retryable": False,
            "retry_after_ms": None,
        }
        return json_response({"error": wire}, status=error.status)
    except ConnectionError:
        raise  # the client is gone; the server drops the connection quietly
    except Exception:
        log.exception("request_failed", extra={"path": request.path})
        wire = {
            "type": "InternalError",
            "code": "InternalError",
            "message": "the engine has a bug; see its log",
            "param": None,
            "retryable": False,
            "retry_after_ms": None,
        }
        return json_response({"error": wire}, status=500)


class SseWriter:
    """Server-sent events of one response. A stream that the engine cuts ends with an error
    event and without `[DONE]`."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )

    async def __aenter__(self) -> SseWriter:
        await self.response.prepare(self._request)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.response.write_eof()

    async def send(self, event: Any) -> None:
        """One `data:` event."""
        await self.response.write(b"data: " + orjson.dumps(event) + b"\n\n")

    async def check(self, progress: Progress) -> bool:
        """False, after an error event, if the engine failed the sample."""
        try:
            check_finish(progress)
        except StitchError as error:
            await self.send(error_body(error))
            return False
        return True

    async def send_done(self) -> None:
        """The terminator of a whole stream."""
        await self.response.write(b"data: [DONE]\n\n")
