"""`EmbeddedEngine`: the Engine protocol over the embedded engine's own HTTP routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import orjson

from stitch.engines.base import (
    EngineCapabilities,
    EngineDescription,
    Health,
    LiveTensor,
    RankChannel,
    RankOrder,
    RankReply,
    RouteKind,
)
from stitch.engines.embedded.routes import classify
from stitch.engines.embedded.wire import order_to_wire, replies_from_wire
from stitch.env import Env
from stitch.errors import ActivationFailed, EngineUnavailable, InvalidInput
from stitch.types import ActivationMode, Label

__all__ = ["EmbeddedEngine", "EngineTimeouts"]

_CAPABILITIES: Final = EngineCapabilities(
    modes=frozenset(ActivationMode),
    destinations=frozenset({"disk", "cpu"}),
    spans=True,
    final_responses=True,
    keyed_cache=True,
)


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """Deadlines of control calls, in seconds.

    control_s bounds pause, flush, abort and describe: a pause waits for one forward pass.
    resume_s bounds a resume, which may recompute every running request.
    """

    control_s: float = 30.0
    resume_s: float = 120.0
    health_s: float = 2.0


class EmbeddedEngine:
    """One embedded engine under one sidecar. Methods run on one event loop; `close` at the end."""

    def __init__(self, base_url: str, env: Env, *, timeouts: EngineTimeouts | None = None) -> None:
        self._base_url = base_url.rstrip("/")
        self._env = env
        self._timeouts = timeouts or EngineTimeouts()
        self._session: aiohttp.ClientSession | None = None
        self._ranks = _Ranks(self)

    @property
    def base_url(self) -> str:
        """`http://127.0.0.1:PORT`."""
        return self._base_url

    @property
    def capabilities(self) -> EngineCapabilities:
        """All modes; labels and cache keys are the engine's own work."""
        return _CAPABILITIES

    @property
    def ranks(self) -> RankChannel:
        """The one rank's channel."""
        return self._ranks

    def route(self, method: str, path: str) -> RouteKind:
        """Classify one route."""
        return classify(method, path)

    async def describe(self) -> EngineDescription:
        """Model identity and every canonical tensor as the rank holds it."""
        raw = await self.call("GET", "/stitch/describe", deadline_s=self._timeouts.control_s)
        try:
            return EngineDescription(
                name=raw["name"],
                version=raw["version"],
                boot_id=raw["boot_id"],
                model_path=raw["model_path"],
                architecture=raw["architecture"],
                rank_count=raw["rank_count"],
                tensors=tuple(
                    LiveTensor(t["name"], t["dtype"], tuple(t["shape"]), t["nbytes"])
                    for t in raw["tensors"]
                ),
            )
        except (KeyError, TypeError) as error:
            raise EngineUnavailable(
                f"{self._base_url} does not describe itself as an embedded engine"
            ) from error

    async def health(self) -> Health:
        """Probe `/stitch/health`, which answers while paused."""
        try:
            async with (
                self._env.clock.timeout(self._timeouts.health_s),
                self._open().get(f"{self._base_url}/stitch/health") as response,
            ):
                return Health.HEALTHY if response.status == 200 else Health.UNRESPONSIVE
        except TimeoutError:
            return Health.UNRESPONSIVE
        except aiohttp.ClientConnectorError:
            return Health.UNREACHABLE
        except (aiohttp.ClientError, OSError):
            return Health.UNRESPONSIVE

    async def pause(self, mode: ActivationMode) -> None:
        """Stop sampling; returns between two forward passes."""
        await self.call(
            "POST", "/stitch/pause", {"mode": mode.value}, deadline_s=self._timeouts.control_s
        )

    async def resume(self, *, recompute: bool) -> float:
        """Go on sampling. Returns: seconds spent recomputing."""
        raw = await self.call(
            "POST", "/stitch/resume", {"recompute": recompute}, deadline_s=self._timeouts.resume_s
        )
        return float(raw["recompute_s"])

    async def flush(self) -> bool:
        """Drop the shared prefix cache."""
        try:
            raw = await self.call("POST", "/flush_cache", {}, deadline_s=self._timeouts.control_s)
        except InvalidInput:
            return False  # requests run; the engine says so and flushes nothing
        return raw.get("flushed") is True

    async def abort(self, rid: str) -> None:
        """End one request by its id."""
        # Whole requests only: the name of one sample may be the id that another client chose.
        body = {"rid": rid, "whole": True}
        await self.call("POST", "/abort_request", body, deadline_s=self._timeouts.control_s)

    def stamp_request(self, path: str, body: dict[str, Any], *, rid: str, label: Label) -> None:
        """Add `rid` unless the client sent one, and the epoch-keyed `extra_key`."""
        if body.get("rid") is None:
            body["rid"] = rid
        key = f"{label.ref}@{label.epoch}"
        own = body.get("extra_key")
        if isinstance(own, list):
            body["extra_key"] = [_joined(key, item) for item in own]
        else:
            body["extra_key"] = _joined(key, own)

    def stamp_response(self, path: str, body: dict[str, Any], *, admitted: Label) -> None:
        """Nothing to add: the engine's responses are final."""

    async def close(self) -> None:
        """Close the control connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self, method: str, path: str, body: Any = None, *, deadline_s: float
    ) -> dict[str, Any]:
        """One control call.

        Raises: EngineUnavailable on a lost connection, a passed deadline or a 5xx;
            ActivationFailed if the engine says so; InvalidInput for a 4xx.
        """
        data = None if body is None else orjson.dumps(body)
        headers = {"content-type": "application/json"} if data is not None else {}
        url = f"{self._base_url}{path}"
        try:
            async with (
                self._env.clock.timeout(deadline_s),
                self._open().request(method, url, data=data, headers=headers) as response,
            ):
                status, raw = response.status, await response.read()
        except TimeoutError as error:
            raise EngineUnavailable(f"{method} {url} had no answer in {deadline_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"{method} {url} failed: {error}") from error
        try:
            answer = orjson.loads(raw)
        except orjson.JSONDecodeError:
            answer = None
        if status == 200 and isinstance(answer, dict):
            return answer
        code, reason = _error(answer)
        message = f"{method} {url} answered {status}: {reason}"
        if code == ActivationFailed.code:
            raise ActivationFailed(message)
        if 400 <= status < 500:
            raise InvalidInput(message)
        raise EngineUnavailable(message)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Deadlines are the caller's; orders queue behind one another in the engine anyway.
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                connector=aiohttp.TCPConnector(limit=64, keepalive_timeout=30),
            )
        return self._session


class _Ranks:
    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def order(self, order: RankOrder, *, deadline_s: float) -> Sequence[RankReply]:
        """Send to the engine's one rank."""
        try:
            raw = await self._engine.call(
                "POST", "/stitch/rank", order_to_wire(order), deadline_s=deadline_s
            )
            return replies_from_wire(raw)
        except InvalidInput as error:
            raise EngineUnavailable(
                f"the engine did not understand order {order.op}: {error.message}"
            ) from error


def _joined(key: str, own: Any) -> str:
    return key if own is None else f"{key}|{own}"


def _error(answer: Any) -> tuple[str, str]:
    """Code and message of an error answer."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        return "", "no error object"
    return str(error.get("code", "")), str(error.get("message", "no message"))
