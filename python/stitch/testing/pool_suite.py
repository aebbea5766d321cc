"""Conformance suite for `Pool`: one function per promise, and broken pools that each must catch.

A backend plugs in with a `PoolHarness`; `run_case(name, harness)` runs one case, raising
AssertionError where a promise is broken. `BROKEN` lists wrappers that break one promise each and
the case that must notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from aiohttp import web

from stitch.env import Env
from stitch.errors import Unavailable, Unsupported
from stitch.pools.base import Member, Pool
from stitch.pools.nudge import wake_all

__all__ = ["BROKEN", "CASES", "BrokenPool", "FakeMember", "PoolHarness", "run_case"]

_SOON_S: Final = 2.0
_QUIET_S: Final = 0.4


class FakeMember:
    """An HTTP server that counts wakes, and can hang or refuse."""

    def __init__(self, member_id: str) -> None:
        self.id = member_id
        self.wakes = 0
        self.woken = asyncio.Event()
        self.status = 200
        self.hang = asyncio.Event()
        self.hang.set()
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> FakeMember:
        """Listen on a port of the system's choice."""
        app = web.Application()
        app.router.add_post("/wake", self._wake)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def _wake(self, request: web.Request) -> web.Response:
        self.wakes += 1
        self.woken.set()
        await self.hang.wait()
        return web.json_response({"woken": True}, status=self.status)

    async def stop(self) -> None:
        """Close the port. Safe to repeat."""
        runner, self._runner = self._runner, None
        if runner is not None:
            self.hang.set()
            await runner.cleanup()

    @property
    def member(self) -> Member:
        """How discovery should show it."""
        return Member(self.id, f"http://127.0.0.1:{self.port}")


class PoolHarness(Protocol):
    """What a backend provides to be tested. The suite owns the fake members."""

    async def make(self, members: Sequence[Member]) -> Pool:
        """A new open pool that discovers exactly `members`."""
        ...

    async def change(self, members: Sequence[Member]) -> bool:
        """Let discovery answer with `members` from now on. False if the set is fixed."""
        ...

    async def break_discovery(self) -> bool:
        """Let discovery fail until the next `change`. False if it cannot fail."""
        ...


Case = Callable[[PoolHarness], Awaitable[None]]
CASES: Final[dict[str, Case]] = {}


def _case(function: Case) -> Case:
    CASES[getattr(function, "__name__", "")] = function
    return function


async def run_case(name: str, harness: PoolHarness) -> None:
    """Run one case. Raises: AssertionError if the pool breaks the promise."""
    await CASES[name](harness)


def _addresses(*ids: str) -> list[Member]:
    return [Member(name, f"http://127.0.0.1:{9000 + i}") for i, name in enumerate(ids)]


async def _next(stream: AsyncIterator[Sequence[Member]]) -> list[Member]:
    async with asyncio.timeout(_SOON_S):
        return list(await anext(stream))


def _watch(pool: Pool) -> Any:
    return aclosing(pool.watch())


@_case
async def members_are_sorted_by_id(harness: PoolHarness) -> None:
    pool = await harness.make(_addresses("c", "a", "b"))
    try:
        assert [m.id for m in await pool.members()] == ["a", "b", "c"]
    finally:
        await pool.close()


@_case
async def members_keep_their_urls(harness: PoolHarness) -> None:
    wanted = _addresses("a", "b")
    pool = await harness.make(wanted)
    try:
        assert list(await pool.members()) == wanted
        assert list(await pool.members()) == wanted, "a second look changed the answer"
    finally:
        await pool.close()


@_case
async def a_vanished_member_is_not_an_error(harness: PoolHarness) -> None:
    both = _addresses("a", "b")
    pool = await harness.make(both)
    try:
        if await harness.change(both[:1]):
            assert list(await pool.members()) == both[:1]
    finally:
        await pool.close()


@_case
async def an_empty_pool_is_an_answer(harness: PoolHarness) -> None:
    pool = await harness.make(_addresses("a"))
    try:
        if await harness.change([]):
            assert list(await pool.members()) == []
    finally:
        await pool.close()


@_case
async def failed_discovery_is_unavailable_never_empty(harness: PoolHarness) -> None:
    pool = await harness.make(_addresses("a"))
    try:
        if not await harness.break_discovery():
            return
        try:
            found = await pool.members()
        except Unavailable:
            return
        raise AssertionError(f"failed discovery answered {found}")
    finally:
        await pool.close()


@_case
async def members_come_back_after_failed_discovery(harness: PoolHarness) -> None:
    both = _addresses("a", "b")
    pool = await harness.make(both[:1])
    try:
        if await harness.break_discovery():
            with suppress(Unavailable):
                await pool.members()
            await harness.change(both)
            assert list(await pool.members()) == both
    finally:
        await pool.close()


@_case
async def watch_yields_at_once(harness: PoolHarness) -> None:
    wanted = _addresses("a", "b")
    pool = await harness.make(wanted)
    try:
        async with _watch(pool) as stream:
            assert await _next(stream) == wanted
    finally:
        await pool.close()


@_case
async def watch_yields_the_full_list_after_a_change(harness: PoolHarness) -> None:
    all_three = _addresses("a", "b", "c")
    pool = await harness.make(all_three[:2])
    try:
        async with _watch(pool) as stream:
            await _next(stream)
            if await harness.change(all_three):
                assert await _next(stream) == all_three
                await harness.change(all_three[1:])
                assert await _next(stream) == all_three[1:]
    finally:
        await pool.close()


@_case
async def watch_is_silent_without_a_change(harness: PoolHarness) -> None:
    pool = await harness.make(_addresses("a", "b"))
    try:
        async with _watch(pool) as stream:
            await _next(stream)
            try:
                async with asyncio.timeout(_QUIET_S):
                    found = await anext(stream)
            except TimeoutError:
                return
            raise AssertionError(f"nothing changed, yet watch yielded {found}")
    finally:
        await pool.close()


@_case
async def watch_keeps_the_last_list_while_discovery_fails(harness: PoolHarness) -> None:
    both = _addresses("a", "b")
    pool = await harness.make(both[:1])
    try:
        async with _watch(pool) as stream:
            await _next(stream)
            if await harness.break_discovery():
                pending = asyncio.ensure_future(_next(stream))
                await asyncio.sleep(_QUIET_S)
                assert not pending.done(), "failed discovery ended or changed the watch"
                await harness.change(both)
                assert await pending == both
    finally:
        await pool.close()


@_case
async def every_watcher_sees_every_change(harness: PoolHarness) -> None:
    both = _addresses("a", "b")
    pool = await harness.make(both[:1])
    try:
        async with _watch(pool) as one, _watch(pool) as two:
            assert await _next(one) == await _next(two) == both[:1]
            if await harness.change(both):
                assert await _next(one) == await _next(two) == both
    finally:
        await pool.close()


@_case
async def close_ends_the_watch(harness: PoolHarness) -> None:
    pool = await harness.make(_addresses("a"))
    async with _watch(pool) as stream:
        await _next(stream)
        pending = asyncio.ensure_future(_drain(stream))
        await asyncio.sleep(0)
        await pool.close()
        async with asyncio.timeout(_SOON_S):
            assert await pending == []


async def _drain(stream: AsyncIterator[Sequence[Member]]) -> list[Sequence[Member]]:
    return [found async for found in stream]


@_case
async def close_is_safe_to_repeat(harness: PoolHarness) -> None:
    pool = await harness.make(_addresses("a"))
    await pool.close()
    await pool.close()


@_case
async def wake_reaches_every_member_and_counts_answers(harness: PoolHarness) -> None:
    fakes = [await FakeMember(name).start() for name in ("a", "b", "c")]
    pool = await harness.make([fake.member for fake in fakes])
    try:
        assert await pool.wake() == 3
        assert [fake.wakes for fake in fakes] == [1, 1, 1]
        await fakes[0].stop()
        fakes[1].status = 500
        assert await pool.wake() == 1, "a dead or failing member was counted"
        assert fakes[2].wakes == 2
    finally:
        await pool.close()
        await asyncio.gather(*(fake.stop() for fake in fakes))


@_case
async def a_hanging_member_delays_no_other_wake(harness: PoolHarness) -> None:
    fakes = [await FakeMember(name).start() for name in ("a", "b", "c")]
    fakes[0].hang.clear()
    pool = await harness.make([fake.member for fake in fakes])
    try:
        wake = asyncio.ensure_future(pool.wake())
        async with asyncio.timeout(_QUIET_S):
            for fake in fakes:
                await fake.woken.wait()
        async with asyncio.timeout(_SOON_S):
            assert await wake == 2, "the hanging member was counted"
    except TimeoutError as error:
        raise AssertionError("a hanging member held back the wakes of others") from error
    finally:
        await pool.close()
        await asyncio.gather(*(fake.stop() for fake in fakes))


@_case
async def wake_never_raises(harness: PoolHarness) -> None:
    fake = await FakeMember("a").start()
    await fake.stop()
    pool = await harness.make([fake.member])
    try:
        assert await pool.wake() == 0
        if await harness.break_discovery():
            assert await pool.wake() == 0
    except Exception as error:
        raise AssertionError(f"wake raised {error!r}") from error
    finally:
        await pool.close()


@_case
async def scale_acts_or_is_unsupported(harness: PoolHarness) -> None:
    pool = await harness.make(_addresses("a", "b"))
    try:
        with suppress(Unsupported):
            await pool.scale(1)
            async with asyncio.timeout(_SOON_S):
                while len(await pool.members()) != 1:  # noqa: ASYNC110 (no event to wait for)
                    await asyncio.sleep(0.01)
    except TimeoutError as error:
        raise AssertionError("scale returned without an effect") from error
    finally:
        await pool.close()


@dataclass(frozen=True, slots=True)
class BrokenPool:
    """A pool that breaks one promise: how to wrap a good one, and the case that must notice."""

    name: str
    wrap: Callable[[Pool], Pool]
    caught_by: str


class _Wrapped:
    def __init__(self, inner: Pool) -> None:
        self.inner = inner

    async def members(self) -> Sequence[Member]:
        return await self.inner.members()

    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        async with _watch(self.inner) as stream:
            async for found in stream:
                yield found

    async def wake(self) -> int:
        return await self.inner.wake()

    async def scale(self, replicas: int) -> None:
        await self.inner.scale(replicas)

    async def close(self) -> None:
        await self.inner.close()


class _Unsorted(_Wrapped):
    async def members(self) -> Sequence[Member]:
        return list(reversed(await self.inner.members()))


class _EmptyOnFailure(_Wrapped):
    async def members(self) -> Sequence[Member]:
        try:
            return await self.inner.members()
        except Unavailable:
            return []


class _NeverForgets(_Wrapped):
    def __init__(self, inner: Pool) -> None:
        super().__init__(inner)
        self.known: dict[str, Member] = {}

    async def members(self) -> Sequence[Member]:
        self.known |= {m.id: m for m in await self.inner.members()}
        return [self.known[name] for name in sorted(self.known)]

    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        async with _watch(self.inner) as stream:
            async for found in stream:
                self.known |= {m.id: m for m in found}
                yield [self.known[name] for name in sorted(self.known)]


class _LateWatch(_Wrapped):
    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        async with _watch(self.inner) as stream:
            await anext(stream)
            async for found in stream:
                yield found


class _WatchesDifferences(_Wrapped):
    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        before: list[Member] = []
        async with _watch(self.inner) as stream:
            async for found in stream:
                yield [m for m in found if m not in before]
                before = list(found)


class _Chatty(_Wrapped):
    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        while True:
            yield await self.inner.members()
            await asyncio.sleep(0.02)


class _EndsOnFailure(_Wrapped):
    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        shown: list[Member] | None = None
        while True:
            try:
                found = list(await self.inner.members())
            except Unavailable:
                found = []
            if found != shown:
                shown = found
                yield found
            await asyncio.sleep(0.02)


class _OneWatcher(_Wrapped):
    def __init__(self, inner: Pool) -> None:
        super().__init__(inner)
        self.shared: AsyncIterator[Sequence[Member]] | None = None

    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        if self.shared is None:
            self.shared = self.inner.watch()
        yield await self.inner.members()
        while True:
            yield await anext(self.shared)


class _DeafToClose(_Wrapped):
    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        yield await self.inner.members()
        await asyncio.Event().wait()


class _ClosesOnce(_Wrapped):
    closed = False

    async def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        await self.inner.close()


class _OptimisticWake(_Wrapped):
    async def wake(self) -> int:
        await self.inner.wake()
        return len(await self.inner.members())


class _RaisingWake(_Wrapped):
    async def wake(self) -> int:
        if not await self.inner.wake():
            raise Unavailable("nobody answered")
        return 1


class _SerialWake(_Wrapped):
    async def wake(self) -> int:
        count = 0
        for member in await self.inner.members():
            count += await wake_all([member], env=Env(), deadline_s=1.0)
        return count


class _SilentScale(_Wrapped):
    async def scale(self, replicas: int) -> None:
        return


BROKEN: Final = (
    BrokenPool("unsorted", _Unsorted, "members_are_sorted_by_id"),
    BrokenPool("empty on failure", _EmptyOnFailure, "failed_discovery_is_unavailable_never_empty"),
    BrokenPool("never forgets", _NeverForgets, "watch_yields_the_full_list_after_a_change"),
    BrokenPool("late watch", _LateWatch, "watch_yields_at_once"),
    BrokenPool(
        "watches differences", _WatchesDifferences, "watch_yields_the_full_list_after_a_change"
    ),
    BrokenPool("chatty", _Chatty, "watch_is_silent_without_a_change"),
    BrokenPool(
        "empties on failure", _EndsOnFailure, "watch_keeps_the_last_list_while_discovery_fails"
    ),
    BrokenPool("one watcher", _OneWatcher, "every_watcher_sees_every_change"),
    BrokenPool("deaf to close", _DeafToClose, "close_ends_the_watch"),
    BrokenPool("closes once", _ClosesOnce, "close_is_safe_to_repeat"),
    BrokenPool("optimistic wake", _OptimisticWake, "wake_reaches_every_member_and_counts_answers"),
    BrokenPool("raising wake", _RaisingWake, "wake_never_raises"),
    BrokenPool("serial wake", _SerialWake, "a_hanging_member_delays_no_other_wake"),
    BrokenPool("silent scale", _SilentScale, "scale_acts_or_is_unsupported"),
)
