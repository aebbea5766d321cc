"""wait_live: who is counted, who is missing and why, and that the dead are never waited for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from stitch.errors import InvalidInput, Unavailable
from stitch.pools.base import Member
from stitch.publisher import Publisher
from stitch.publisher.live import LiveWatch, fetch_server_info
from stitch.publisher.publication import LiveReport
from stitch.testing.clock import run_virtual, virtual_env
from stitch.testing.memory_store import MemoryStore
from stitch.types import Ref

REF = Ref("a", 3)
Report = Mapping[str, Any] | None


class FixedPool:
    def __init__(self, count: int) -> None:
        self._members = [Member(f"m{n}", f"http://m{n}") for n in range(count)]

    async def members(self) -> Sequence[Member]:
        return self._members

    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        yield self._members

    async def wake(self) -> int:
        return 0

    async def scale(self, replicas: int) -> None:
        return None

    async def close(self) -> None:
        return None


def report(
    version: int | None, state: str = "READY", incarnation: str = "i", run: str = "a"
) -> Report:
    served = None if version is None else {"run_id": run, "version": version}
    return {"replica_id": None, "incarnation": incarnation, "state": state, "served": served}


def wait(
    scripts: Sequence[Callable[[int], Report]], replicas: int | float, timeout_s: float = 10.0
) -> LiveReport:
    """Each script gives a member's report by call number; None means no answer."""
    calls = [0] * len(scripts)

    async def fetch(url: str) -> Mapping[str, Any]:
        number = int(url.removeprefix("http://m"))
        calls[number] += 1
        found = scripts[number](calls[number])
        if found is None:
            raise Unavailable("connection refused")
        return found

    async def run() -> LiveReport:
        watch = LiveWatch(FixedPool(len(scripts)), virtual_env(1), fetch)
        return await watch.wait(REF, replicas=replicas, timeout_s=timeout_s)

    return run_virtual(run)


def test_all_are_waited_for() -> None:
    found = wait([lambda n: report(3 if n > 4 else 2), lambda n: report(3)], 1.0)
    assert found.live == ("m0", "m1")
    assert found.missing == {}
    assert found.enough


def test_a_later_version_counts_and_another_run_does_not() -> None:
    found = wait([lambda n: report(5), lambda n: report(9, run="b")], 1.0, timeout_s=1.0)
    assert found.live == ("m0",)
    assert "b/weight_v000009" in found.missing["m1"]
    assert not found.enough


def test_a_count_is_enough_without_the_others() -> None:
    found = wait([lambda n: report(3), lambda n: report(2), lambda n: report(1)], 1)
    assert found.live == ("m0",)
    assert set(found.missing) == {"m1", "m2"}
    assert found.enough


def test_a_share_is_rounded_up() -> None:
    found = wait([lambda n: report(3), lambda n: report(3), lambda n: report(2)], 0.5, 1.0)
    assert (found.wanted, found.enough) == (2, True)


@pytest.mark.parametrize("state", ["BOOTING", "UNKNOWN", "DRAINING", "FAILED"])
def test_who_was_not_ready_at_the_call_is_not_counted(state: str) -> None:
    found = wait([lambda n: report(3), lambda n: report(None, state)], 1.0)
    assert found.live == ("m0",)
    assert found.wanted == 1
    assert state in found.missing["m1"]


def test_one_that_is_catching_up_is_counted() -> None:
    found = wait([lambda n: report(3 if n > 3 else None, "CATCHING_UP")], 1.0)
    assert found.enough


def test_one_in_the_middle_of_a_swap_is_counted() -> None:
    swapping = {**(report(None, "UNKNOWN") or {}), "sync_state": "COMMITTING"}
    found = wait([lambda n: swapping if n < 3 else report(3)], 1)
    assert found.live == ("m0",)
    assert found.missing == {}


def test_one_that_dies_is_missing_and_not_waited_for() -> None:
    found = wait([lambda n: report(3), lambda n: report(2) if n < 3 else None], 1.0, 3600.0)
    assert found.live == ("m0",)
    assert "connection refused" in found.missing["m1"]
    assert not found.enough


def test_another_incarnation_is_not_the_one_that_was_counted() -> None:
    found = wait([lambda n: report(3, incarnation="i" if n == 1 else "j")], 1.0, 3600.0)
    assert found.live == ()
    assert "incarnation" in found.missing["m0"]


def test_a_short_silence_is_forgiven() -> None:
    found = wait([lambda n: None if n in (2, 3) else report(3 if n > 4 else 2)], 1.0)
    assert found.enough


def test_an_empty_pool_has_nobody_to_wait_for() -> None:
    assert wait([], 1.0).enough
    assert not wait([], 1, timeout_s=1.0).enough


@pytest.mark.parametrize("replicas", [-1, 1.5, -0.1, True])
def test_impossible_counts_are_refused(replicas: Any) -> None:
    with pytest.raises(InvalidInput):
        wait([lambda n: report(3)], replicas)


def test_a_replica_under_two_addresses_is_one() -> None:
    twin = {**(report(5) or {}), "replica_id": "one"}
    found = wait([lambda call: twin, lambda call: twin], 2)
    assert (found.live, found.wanted, found.enough) == (("one",), 2, False)


@pytest.mark.parametrize("hangs", ["at once", "later"])
def test_one_that_hangs_does_not_stretch_the_timeout(hangs: str) -> None:
    env = virtual_env(1)
    looks = 0

    async def fetch(url: str) -> Mapping[str, Any]:
        nonlocal looks
        looks += 1
        if url == "http://m1" and (hangs == "at once" or looks > 2):
            await env.clock.sleep(1000)
        return report(4) or {}

    async def run() -> float:
        await LiveWatch(FixedPool(2), env, fetch).wait(REF, replicas=1.0, timeout_s=1.0)
        return env.clock.monotonic()

    assert run_virtual(run) < 2.5


@pytest.mark.parametrize("timeout_s", [float("nan"), -1.0])
def test_times_that_are_none_are_refused(timeout_s: float) -> None:
    with pytest.raises(InvalidInput, match="timeout"):
        wait([lambda call: report(5)], 1, timeout_s)


async def test_reports_come_from_server_info_over_http() -> None:
    async def server_info(request: web.Request) -> web.Response:
        return web.json_response({"state": "READY", "pad": "x" * 300_000})

    async def flood(request: web.Request) -> web.Response:
        return web.Response(body=b" " * (2 << 20))

    async def deep(request: web.Request) -> web.Response:
        return web.Response(text="[" * 200_000)

    async def broken(request: web.Request) -> web.Response:
        return web.json_response({"state": "READY"}, status=500)

    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>")

    app = web.Application()
    app.router.add_get("/server_info", server_info)
    app.router.add_get("/page/server_info", page)
    app.router.add_get("/flood/server_info", flood)
    app.router.add_get("/deep/server_info", deep)
    app.router.add_get("/broken/server_info", broken)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        found = await fetch_server_info(f"http://127.0.0.1:{port}/")
        assert found["state"] == "READY"
        for path in ("page", "deep", "broken", "absent"):
            with pytest.raises(Unavailable, match="no report"):
                await fetch_server_info(f"http://127.0.0.1:{port}/{path}")
        with pytest.raises(Unavailable, match="over"):
            await fetch_server_info(f"http://127.0.0.1:{port}/flood")
    finally:
        await runner.cleanup()
    with pytest.raises(Unavailable, match="no report"):
        await fetch_server_info(f"http://127.0.0.1:{port}")


def test_a_failed_publication_is_one_line_that_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """Where logging was not set up, the message alone is shown."""
    store = MemoryStore()

    async def begin(prefix: str, *, attempt: str) -> Any:
        raise InvalidInput(f"{store.url} takes no version\nnow")

    store.begin = begin  # type: ignore[method-assign]
    with Publisher(store, run_id="a") as publisher:
        publication = publisher.publish({"w": np.ones(99, np.float32)})
        with pytest.raises(InvalidInput, match="takes no version"):
            publication.wait(30)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "stitch.publisher.worker"]
    assert line == f"publishing a/weight_v000001 failed: {store.url} takes no version now"


def test_a_publisher_asks_its_pool() -> None:
    async def fetch(url: str) -> Mapping[str, Any]:
        served = {"run_id": "a", "version": 1}
        return {"replica_id": url[-2:], "state": "READY", "incarnation": "i", "served": served}

    with Publisher(MemoryStore(), run_id="a", pool=FixedPool(2), fetch_report=fetch) as publisher:
        version = publisher.publish({"w": np.ones(3, np.float32)}).wait(30).ref.version
        report = publisher.wait_live(version, replicas=2, timeout=5)
        assert (report.live, report.missing, report.enough) == (("m0", "m1"), {}, True)
    with (
        Publisher(MemoryStore(), run_id="a") as publisher,
        pytest.raises(InvalidInput, match="pool"),
    ):
        publisher.wait_live(1)
