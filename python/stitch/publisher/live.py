"""Waiting until replicas serve a version. Who dies meanwhile is missing, never waited for."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from stitch.env import Env
from stitch.errors import InvalidInput, Unavailable
from stitch.pools.base import Member, Pool
from stitch.publisher.publication import LiveReport
from stitch.types import Ref, ReplicaState

__all__ = ["FetchReport", "LiveWatch", "fetch_server_info"]

FetchReport = Callable[[str], Awaitable[Mapping[str, Any]]]

_REPORT_S_MAX: Final = 5.0
# A report that is asked for when the time is up gets so long all the same.
_LAST_LOOK_S: Final = 0.5
_REPORT_BYTES_MAX: Final = 1 << 20
_PAUSE_S: Final = 0.1
_MISSES_MAX: Final = 3
_COUNTED: Final = frozenset({ReplicaState.READY.value, ReplicaState.CATCHING_UP.value})


async def fetch_server_info(url: str) -> Mapping[str, Any]:
    """GET `<url>/server_info`. Raises: Unavailable."""
    import aiohttp

    limit = aiohttp.ClientTimeout(total=_REPORT_S_MAX)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.get(f"{url.rstrip('/')}/server_info") as answer,
        ):
            if answer.status != 200:
                raise Unavailable(f"{url}: no report (HTTP {answer.status})")
            body = bytearray()
            async for chunk in answer.content.iter_chunked(1 << 16):
                body += chunk
                if len(body) > _REPORT_BYTES_MAX:
                    raise Unavailable(f"{url}: its report is over {_REPORT_BYTES_MAX} bytes")
            document = json.loads(body)
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
        raise Unavailable(f"{url}: no report ({type(error).__name__})") from error
    if not isinstance(document, dict):
        raise Unavailable(f"{url}: its report is no JSON object")
    return document


@dataclass
class _Watched:
    member: Member
    replica_id: str
    incarnation: str | None
    reason: str = "no report yet"
    live: bool = False
    dead: bool = False
    misses: int = 0


class LiveWatch:
    """Counts the incarnations that were READY or CATCHING_UP at the call."""

    def __init__(self, pool: Pool, env: Env, fetch: FetchReport = fetch_server_info) -> None:
        self._pool = pool
        self._env = env
        self._fetch = fetch

    async def wait(self, ref: Ref, *, replicas: int | float, timeout_s: float) -> LiveReport:
        """Wait until enough replicas serve `ref` or a later version of its run.

        Args: replicas: a count (int), or a share of those counted (float, 0 to 1).
        Returns: who is live and who is missing and why, also when the time is up or so many
            died that the rest cannot be enough.
        Raises: InvalidInput for an impossible `replicas`; Unavailable if discovery fails.
        """
        _check_replicas(replicas)
        if not timeout_s >= 0:
            raise InvalidInput(f"timeout {timeout_s!r} must be 0 or more seconds", param="timeout")
        deadline = self._env.clock.monotonic() + timeout_s
        watched, passed_over = await self._roll_call(deadline)
        wanted = replicas if isinstance(replicas, int) else math.ceil(replicas * len(watched))
        while True:
            await asyncio.gather(
                *(self._look(one, ref, deadline) for one in watched if not one.dead)
            )
            live = [one for one in watched if one.live]
            possible = [one for one in watched if not one.dead]
            now = self._env.clock.monotonic()
            if len(live) >= wanted or len(possible) < wanted or now >= deadline:
                missing = {one.replica_id: one.reason for one in watched if not one.live}
                live_ids = tuple(sorted(one.replica_id for one in live))
                return LiveReport(ref.version, live_ids, {**passed_over, **missing}, wanted)
            await self._env.clock.sleep(min(_PAUSE_S, deadline - now))

    async def _roll_call(self, deadline: float) -> tuple[list[_Watched], dict[str, str]]:
        members = await self._pool.members()
        reports = await asyncio.gather(*(self._report(member, deadline) for member in members))
        watched: list[_Watched] = []
        passed_over: dict[str, str] = {}
        for member, report in zip(members, reports, strict=True):
            name = str(report.get("replica_id") or member.id)
            state = str(report.get("state"))
            found = _Watched(member, name, _text(report, "incarnation"))
            if any(
                (one.replica_id, one.incarnation) == (name, found.incarnation) for one in watched
            ):
                continue  # the same replica under another address
            if state in _COUNTED or _is_swapping(report):
                watched.append(found)
            else:
                passed_over[name] = str(report.get("error") or f"not counted: it was {state}")
        return watched, passed_over

    async def _report(self, member: Member, deadline: float) -> Mapping[str, Any]:
        left = deadline - self._env.clock.monotonic()
        try:
            async with self._env.clock.timeout(min(_REPORT_S_MAX, max(_LAST_LOOK_S, left))):
                return await self._fetch(member.url)
        except (Unavailable, TimeoutError) as error:
            return {"error": str(error) or "no report in time"}

    async def _look(self, one: _Watched, ref: Ref, deadline: float) -> None:
        report = await self._report(one.member, deadline)
        if "error" in report and "state" not in report:
            one.misses += 1
            one.live = False
            one.reason = str(report["error"])
            one.dead = one.misses >= _MISSES_MAX
            return
        one.misses = 0
        if _text(report, "incarnation") != one.incarnation:
            one.dead, one.live = True, False
            one.reason = "its engine died: another incarnation answers now"
            return
        served = _served(report)
        one.live = (
            served is not None and served.run_id == ref.run_id and served.version >= ref.version
        )
        state = str(report.get("state"))
        if state == ReplicaState.FAILED.value:
            one.dead, one.live = True, False
        one.reason = f"{state}, serves {served or 'an unknown version'}"
        if report.get("reason"):
            one.reason += f": {report['reason']}"


def _check_replicas(replicas: int | float) -> None:
    good = isinstance(replicas, int) and not isinstance(replicas, bool) and replicas >= 0
    if not good and not (isinstance(replicas, float) and 0.0 <= replicas <= 1.0):
        raise InvalidInput(
            f"replicas {replicas!r} must be a count (int) or a share from 0.0 to 1.0 (float)",
            param="replicas",
        )


def _is_swapping(report: Mapping[str, Any]) -> bool:
    """It was READY or CATCHING_UP a moment ago: a swap of weights is UNKNOWN while it lasts."""
    unknown = report.get("state") == ReplicaState.UNKNOWN.value
    return unknown and report.get("sync_state") == "COMMITTING"


def _text(report: Mapping[str, Any], key: str) -> str | None:
    value = report.get(key)
    return value if isinstance(value, str) else None


def _served(report: Mapping[str, Any]) -> Ref | None:
    served = report.get("served")
    if not isinstance(served, Mapping):
        return None
    run_id, version = served.get("run_id"), served.get("version")
    if not isinstance(run_id, str) or not isinstance(version, int):
        return None
    try:
        return Ref(run_id, version)
    except InvalidInput:
        return None
