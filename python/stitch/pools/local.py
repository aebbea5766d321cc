"""`FilePool`: members from a file that another process replaces, such as `LocalPool`'s.

The file is a small JSON document, `{"format": {"major": 1, "minor": 0}, "members": [{"id": …,
"url": …}, …]}`, always replaced by rename, never edited in place. An empty list is an answer:
the pool has no members. A missing or malformed file is not: discovery failed, and readers keep
the last answer for a bounded time.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from stitch.env import Env
from stitch.errors import Unavailable, Unsupported
from stitch.pools.addresses import normalize_address
from stitch.pools.base import Member
from stitch.pools.nudge import wake_all

__all__ = ["FilePool", "read_members", "write_members"]

_FORMAT_MAJOR: Final = 1
_SIZE_MAX: Final = 16 * 1024 * 1024

Scaler = Callable[[int], Awaitable[None]]


def write_members(env: Env, path: Path, members: Sequence[Member]) -> None:
    """Replace the members file. Readers see the old list or the new one. Blocking."""
    document = {
        "format": {"major": _FORMAT_MAJOR, "minor": 0},
        "members": [{"id": m.id, "url": m.url} for m in sorted(members, key=lambda m: m.id)],
    }
    attempt = path.with_name(f"{path.name}.{env.random.nonce()}.tmp")
    handle = env.files.create(attempt)
    try:
        handle.write(json.dumps(document).encode())
    finally:
        handle.close()
    env.files.rename(attempt, path)


def read_members(env: Env, path: Path) -> list[Member]:
    """The members in the file, sorted by id. Blocking.

    Raises: Unavailable if the file is missing, unreadable, or not what `write_members` writes.
    """
    try:
        size = env.files.size(path)
        if size is None or size > _SIZE_MAX:
            raise Unavailable(f"members file {path} is missing or not a small file")
        document = json.loads(env.files.read(path))
        if document["format"]["major"] != _FORMAT_MAJOR:
            raise Unavailable(f"members file {path} has an unknown format {document['format']}")
        found = {}
        for entry in document["members"]:
            url = normalize_address(str(entry["url"]))
            if url is not None:
                found[str(entry["id"])] = Member(str(entry["id"]), url)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"members file {path} does not parse: {error}") from error
    return [found[key] for key in sorted(found)]


class FilePool:
    """A pool whose members another process keeps in a file. May be used from several event loops.

    Args:
        poll_s: how often `watch` looks at the file.
        stale_s_max: how long `watch` keeps the last answer while discovery fails.
        scale: called by `scale`; without it the pool cannot scale.
    """

    def __init__(
        self,
        path: Path,
        *,
        env: Env,
        poll_s: float = 0.1,
        stale_s_max: float = 30.0,
        wake_deadline_s: float = 2.0,
        scale: Scaler | None = None,
    ) -> None:
        self._path = path
        self._env = env
        self._poll_s = poll_s
        self._stale_s_max = stale_s_max
        self._scale = scale
        self._wake_deadline_s = wake_deadline_s
        self._closed = False

    async def members(self) -> Sequence[Member]:
        if self._closed:
            raise Unavailable("the pool is closed")
        return read_members(self._env, self._path)

    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        """See `Pool.watch`. Raises: Unavailable once discovery failed for `stale_s_max`."""
        shown: list[Member] | None = None
        answered = self._env.clock.monotonic()
        while not self._closed:
            try:
                found = read_members(self._env, self._path)
            except Unavailable:
                if self._env.clock.monotonic() - answered > self._stale_s_max:
                    raise
            else:
                answered = self._env.clock.monotonic()
                if found != shown:
                    shown = found
                    yield list(found)
                    continue
            await self._env.clock.sleep(self._poll_s)

    async def wake(self) -> int:
        try:
            members = await self.members()
        except Unavailable:
            return 0
        return await wake_all(members, env=self._env, deadline_s=self._wake_deadline_s)

    async def scale(self, replicas: int) -> None:
        if self._scale is None:
            raise Unsupported(f"this pool cannot scale to {replicas}; its owner adds and removes")
        await self._scale(replicas)

    async def close(self) -> None:
        self._closed = True
