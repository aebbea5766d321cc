"""Connections to an upstream: framing, reuse, limits, and answers that are no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator

import pytest

from stitch.env import Env
from stitch.errors import InvalidInput, Overloaded
from stitch.http.exchange import Exchange
from stitch.http.limits import UpstreamLimits
from stitch.http.upstream import Upstream, UpstreamLost, origin_of

LIMITS = UpstreamLimits(
    connect_timeout_s=1.0, idle_s=0.3, silence_s=0.3, connections_max=4, sweep_s=0.02
)
REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


class Script:
    """A server that answers each request with the next prepared bytes.

    A trailing None in a script closes the connection after its bytes.
    """

    def __init__(self) -> None:
        self.answers: list[tuple[bytes | None, ...]] = []
        self.connections = 0
        self.requests = 0
        self.step = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                for piece in self.answers.pop(0) if self.answers else (None,):
                    if piece is None:
                        raise ConnectionError
                    for at in range(0, len(piece), self.step or len(piece) or 1):
                        writer.write(piece[at : at + (self.step or len(piece))])
                        await writer.drain()
                        if self.step:
                            await asyncio.sleep(0)
        self._drop(writer)

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.close()


@pytest.fixture
async def script() -> AsyncIterator[Script]:
    found = Script()
    yield found
    await found.close()


@pytest.fixture
async def upstream(script: Script) -> AsyncIterator[Upstream]:
    found = Upstream(await script.start(), limits=LIMITS, env=Env())
    yield found
    await found.close()


async def whole(exchange: Exchange) -> bytes:
    assert await exchange.gather(2**30)
    return exchange.take()


OK = b"HTTP/1.1 200 OK\r\n"
CASES = {
    "sized": ((OK + b"X-A: 1\r\nContent-Length: 5\r\n\r\nhello",), b"hello", True),
    "empty": ((OK + b"Content-Length: 0\r\n\r\n",), b"", True),
    "chunked": (
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nT: 1\r\n\r\n",),
        b"hello",
        True,
    ),
    "until close": ((OK + b"\r\nhello", None), b"hello", False),
    "old": ((b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",), b"hello", False),
    "closing": ((OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello",), b"hello", False),
    "interim": (
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + OK
         + b"Content-Length: 5\r\n\r\nhello",),
        b"hello",
        True,
    ),
    "no reason": ((b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nhello",), b"hello", True),
    "no content": ((b"HTTP/1.1 204 No Content\r\nX: y\r\n\r\n",), b"", True),
    "not modified": ((b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",), b"", True),
    "too much": ((OK + b"Content-Length: 5\r\n\r\nhello and more",), b"hello", False),
}  # fmt: skip


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("name", CASES)
async def test_framing(script: Script, upstream: Upstream, name: str, step: int) -> None:
    answer, body, reused = CASES[name]
    script.answers = [answer, answer]
    script.step = step
    for _ in range(2):
        exchange = await upstream.send(REQUEST)
        assert await whole(exchange) == body
        assert b"content-length" not in exchange.head.lower()
        assert b"transfer-encoding" not in exchange.head.lower()
        await asyncio.sleep(0.02)
    assert script.connections == (1 if reused else 2)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n",
        OK + b"Content-Length: x\r\n\r\n",
        OK + b"Content-Length: -5\r\n\r\n",
        OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
        OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
        OK + b"X: a\nTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n",
        OK + b"X: a\rY: b\r\nContent-Length: 0\r\n\r\n",
        OK + b"X: a\r\n Content-Length: 5\r\nContent-Length: 0\r\n\r\n",
        OK + b"no name\r\nContent-Length: 0\r\n\r\n",
        OK + b"Content-Length : 0\r\n\r\n",
        OK + b"X: " + b"a" * 70_000,
        b"",
    ],
)
async def test_what_is_no_answer(script: Script, upstream: Upstream, answer: bytes) -> None:
    script.answers = [(answer, None)]
    with pytest.raises(UpstreamLost):
        await whole(await upstream.send(REQUEST))
    assert script.requests == 1
    script.answers = [(OK + b"Content-Length: 0\r\n\r\n",)]
    assert await whole(await upstream.send(REQUEST)) == b""


@pytest.mark.parametrize(
    "answer",
    [OK + b"Content-Length: 9\r\n\r\nhello", OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello"],
)
async def test_a_cut_body_is_lost_after_what_came(script, upstream, answer) -> None:
    script.answers = [(answer, None)]
    exchange = await upstream.send(REQUEST)
    came: list[bytes] = []
    with pytest.raises(UpstreamLost):
        await exchange.pipe(came.append)
    assert b"".join(came) == b"hello"


async def test_head_answers_have_no_body(script, upstream) -> None:
    script.answers = [(OK + b"Content-Length: 99\r\n\r\n",)] * 2
    for _ in range(2):
        exchange = await upstream.send(REQUEST, bare=True)
        assert (exchange.done, exchange.length, await whole(exchange)) == (True, 99, b"")
    assert script.connections == 1


async def test_hop_headers_are_filtered_and_others_kept_as_they_are(script, upstream) -> None:
    script.answers = [
        (
            OK + b"X-Keep: A  b\r\nConnection: X-Mine, keep-alive\r\nX-Mine: 1\r\nKeep-Alive: 5\r\n"
            b"SET-cookie: a\r\nSet-Cookie: b\r\nContent-Length: 0\r\n\r\n",
        )
    ]
    exchange = await upstream.send(REQUEST)
    assert exchange.head == OK + b"X-Keep: A  b\r\nSET-cookie: a\r\nSet-Cookie: b\r\n"


async def test_a_stale_connection_is_tried_once_more_but_a_spoken_one_is_not(
    script, upstream
) -> None:
    good = OK + b"Content-Length: 2\r\n\r\nok"
    script.answers = [(good,), (None,), (good,)]
    for _ in range(2):
        assert await whole(await upstream.send(REQUEST)) == b"ok"
    assert script.requests == 3
    script.answers = [(good,), (b"HTT", None), (good,)]
    await whole(await upstream.send(REQUEST))
    with pytest.raises(UpstreamLost):
        await upstream.send(REQUEST)
    # On a fresh connection nothing is tried again.
    script.answers = [(None,), (good,)]
    with pytest.raises(UpstreamLost):
        await upstream.send(REQUEST)


async def test_silence_and_idleness_end(script, upstream) -> None:
    script.answers = [(OK + b"Content-Length: 2\r\n\r\nok",)]
    await whole(await upstream.send(REQUEST))
    assert len(upstream.open) == 1
    async with asyncio.timeout(3):
        while upstream.open:
            await asyncio.sleep(0.01)
    script.answers = [(OK + b"Content-Length: 2\r\n\r\nx",)]
    exchange = await upstream.send(REQUEST)
    with pytest.raises(UpstreamLost, match="silent"):
        await asyncio.wait_for(exchange.gather(10), 3)


async def test_connections_are_bounded_and_closing_cuts(script) -> None:
    limits = dataclasses.replace(LIMITS, silence_s=30)
    upstream = Upstream(await script.start(), limits=limits, env=Env())
    script.answers = [(OK + b"Content-Length: 2\r\n\r\n",)] * 4
    exchanges = [await upstream.send(REQUEST) for _ in range(4)]
    with pytest.raises(Overloaded):
        await upstream.send(REQUEST)
    exchanges[0].cancel()
    waits = [asyncio.create_task(exchange.gather(10)) for exchange in exchanges[1:]]
    await asyncio.sleep(0)
    await upstream.close()
    for wait in waits:
        with pytest.raises(UpstreamLost):
            await wait
    with pytest.raises(UpstreamLost):
        await upstream.send(REQUEST)


async def test_an_unreachable_upstream_is_lost(script) -> None:
    url = await script.start()
    await script.close()
    upstream = Upstream(url, limits=LIMITS, env=Env())
    with pytest.raises(UpstreamLost, match="can't connect"):
        await upstream.send(REQUEST)
    await upstream.close()


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://a:80", ("a", 80, False)),
        ("http://a", ("a", 80, False)),
        ("https://a", ("a", 443, True)),
        ("http://[::1]:5", ("::1", 5, False)),
    ],
)
def test_origins(url: str, origin: tuple[str, int, bool]) -> None:
    assert origin_of(url) == origin


@pytest.mark.parametrize("url", ["", "a:80", "ftp://a", "http://", "http://a:0x", "http://a/path"])
def test_what_is_no_origin(url: str) -> None:
    with pytest.raises(InvalidInput):
        origin_of(url)


async def test_mutated_answers_end_in_a_body_or_a_loss(script, upstream) -> None:
    rng = random.Random(9)
    seeds = [b"".join(p for p in answer if p) for answer, _, _ in CASES.values()]
    bits = [
        b"\r\n",
        b"\n",
        b"\x00",
        b"0\r\n\r\n",
        b"Content-Length: 3\r\n",
        b"HTTP/1.1 ",
        b"ffff\r\n",
    ]
    outcomes = {"body": 0, "lost": 0}
    for _ in range(400):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data) + 1)
            if rng.random() < 0.5:
                data[at:at] = rng.choice(bits)
            else:
                del data[at : at + rng.randint(1, 9)]
        script.answers = [(bytes(data), None), (None,)]
        async with asyncio.timeout(3):
            try:
                await whole(await upstream.send(REQUEST))
                outcomes["body"] += 1
            except UpstreamLost:
                outcomes["lost"] += 1
    assert min(outcomes.values()) > 20
    assert len(upstream.open) <= 4
