"""A store under observation: every pointer move is judged, and single calls can be made to fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Any, cast

from stitch.errors import StitchError, Unavailable
from stitch.stores.base import Sealed, Staging, Store, SwapResult, Unknown
from stitch.stores.versions import parse_stored_pointer, record_of, verify_version

__all__ = ["WatchedStore", "watched"]


class WatchedStore:
    """Passes every call on to `inner`, unless told otherwise.

    violations: pointer moves to something that was not a complete version. failing: method names
    ("put", "put facts" for the measurements, "seal", "swap_pointer") whose next calls raise the
    given error, before they act.
    lost_replies: swaps whose reply is lost; True if they take effect all the same. lost_seals: the
    same for seals, which then raise Unavailable.
    gate: while cleared, `put` waits.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.violations: list[str] = []
        self.failing: dict[str, list[StitchError]] = {}
        self.lost_replies: list[bool] = []
        self.lost_seals: list[bool] = []
        self.put_count = 0
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def fail_next(self, method: str, *errors: StitchError) -> None:
        """Let the next calls of `method` raise."""
        self.failing.setdefault(method, []).extend(errors)

    def _maybe_fail(self, method: str) -> None:
        waiting = self.failing.get(method)
        if waiting:
            raise waiting.pop(0)

    async def swap_pointer(self, expect: str | None, text: str) -> SwapResult:
        """Judge the target, then swap, or pretend that the reply was lost."""
        self._maybe_fail("swap_pointer")
        ref = parse_stored_pointer(text)
        if ref is None:
            self.violations.append("the pointer was emptied")
        else:
            record = await record_of(self.inner, ref.run_id)
            if ref.version > record.boot_version:
                try:
                    await verify_version(self.inner, record, ref.version)
                except StitchError as error:
                    self.violations.append(f"the pointer was moved to {ref}: {error.message}")
        if self.lost_replies:
            if self.lost_replies.pop(0):
                await self.inner.swap_pointer(expect, text)
            return Unknown("the reply was lost")
        return await self.inner.swap_pointer(expect, text)

    async def begin(self, prefix: str, *, attempt: str) -> Staging:
        """A staging under observation."""
        self._maybe_fail("begin")
        return _WatchedStaging(self, await self.inner.begin(prefix, attempt=attempt))


class _WatchedStaging:
    def __init__(self, store: WatchedStore, inner: Staging) -> None:
        self._store = store
        self._inner = inner

    async def put(self, name: str, chunks: Iterable[bytes | bytearray | memoryview]) -> int:
        # Chunks are read after the gate opens, as a slow upload would.
        while not self._store.gate.is_set():
            await _turn()
        self._store._maybe_fail("put facts" if name.endswith(".facts.json") else "put")
        self._store.put_count += 1
        return await self._inner.put(name, chunks)

    async def seal(self, index: bytes) -> Sealed:
        self._store._maybe_fail("seal")
        if self._store.lost_seals:
            if self._store.lost_seals.pop(0):
                await self._inner.seal(index)
            raise Unavailable("the reply to the seal was lost")
        return await self._inner.seal(index)

    async def abandon(self) -> None:
        await self._inner.abandon()

    async def leave(self) -> None:
        await self._inner.leave()


async def _turn() -> None:
    await asyncio.sleep(0.001)


def watched(store: Store) -> tuple[WatchedStore, Store]:
    """The watcher, and the same object as a Store for whoever publishes to it."""
    watcher = WatchedStore(store)
    return watcher, cast(Store, watcher)
