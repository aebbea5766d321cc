"""The HTTP server on raw sockets: framing, limits, time-outs, hostile input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import unittest.mock
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from stitch.env import Env
from stitch.errors import InvalidInput
from stitch.http.connection import Connection
from stitch.http.limits import ServerLimits
from stitch.http.message import Request, Response
from stitch.http.server import HttpServer

LIMITS = ServerLimits(
    head_bytes_max=8192,
    head_count_max=50,
    target_bytes_max=1024,
    body_bytes_max=100_000,
    bodies_bytes_max=250_000,
    head_timeout_s=0.3,
    body_idle_timeout_s=0.3,
    body_timeout_s=0.8,
    keepalive_s=0.5,
    write_stall_s=0.5,
    sweep_s=0.02,
)


async def echo(request: Request, response: Response) -> None:
    if request.path == "/slow":
        await asyncio.sleep(0.05)
    if request.path == "/never":
        await asyncio.Event().wait()
    if request.path == "/bug":
        raise RuntimeError("bug")
    if request.path == "/stream":
        response.begin(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n", None)
        response.write(b"one")
        await asyncio.sleep(0)
        response.write(b"two")
        response.end()
        return
    said = {
        "method": request.method,
        "target": request.target.decode("latin-1"),
        "path": request.path,
        "body": len(request.body),
        "lines": [line.decode("latin-1") for line in request.lines],
    }
    response.send(200, json.dumps(said).encode())


Talk = Callable[[bytes], Awaitable[bytes]]


class Served:
    """A running server and a way to talk to it."""

    def __init__(self, server: HttpServer, port: int) -> None:
        self.server = server
        self.port = port

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def talk(self, *pieces: bytes, pause_s: float = 0.0) -> bytes:
        """Send the pieces, then read until the server closes."""
        reader, writer = await self.open()
        data = b""
        try:
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(pause_s)
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(5):
                    while chunk := await reader.read(65536):
                        data += chunk
        finally:
            writer.close()
        return data


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    server = HttpServer(echo, limits=LIMITS, env=Env())
    port = await server.start("127.0.0.1", 0)
    yield Served(server, port)
    await server.close(1.0)
    assert server.bodies_bytes == 0


def get(path: str = "/", *headers: str, method: str = "GET", close: bool = True) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: a", *headers]
    if close:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def parts(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    line, *rest = head.decode("latin-1").split("\r\n")
    headers = dict(item.split(": ", 1) for item in rest)
    return int(line.split(" ")[1]), headers, body


async def test_keep_alive_and_close(served) -> None:
    reader, writer = await served.open()
    for _ in range(3):
        writer.write(get(close=False))
        status, headers, _ = parts(await reader.readuntil(b"\r\n\r\n"))
        assert status == 200
        assert "Connection" not in headers
        await reader.readexactly(int(headers["Content-Length"]))
    writer.write(get())
    status, headers, _ = parts(await reader.read())
    assert headers["Connection"] == "close"
    writer.close()


async def test_pipelined_requests_are_answered_in_order(served) -> None:
    paths = [f"/{'slow' if i % 7 == 0 else i}" for i in range(60)]
    data = await served.talk(b"".join(get(p, close=p is paths[-1]) for p in paths))
    said = [json.loads(part.partition(b"\r\n\r\n")[2]) for part in data.split(b"HTTP/1.1 200")[1:]]
    assert [item["path"] for item in said] == paths


async def test_http_1_0_closes(served) -> None:
    status, headers, _ = parts(await served.talk(b"GET / HTTP/1.0\r\n\r\n"))
    assert (status, headers["Connection"]) == (200, "close")
    _, headers, body = parts(await served.talk(b"GET /stream HTTP/1.0\r\n\r\n"))
    assert "Transfer-Encoding" not in headers
    assert body == b"onetwo"


async def test_streams_are_chunked(served) -> None:
    _, headers, body = parts(await served.talk(get("/stream")))
    assert headers["Transfer-Encoding"] == "chunked"
    assert body == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


async def test_head_has_no_body(served) -> None:
    status, headers, body = parts(await served.talk(get(method="HEAD")))
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 0


async def test_chunked_requests_and_trailers(served) -> None:
    body = b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nX-Late: 1\r\nx-stitch-min-version: 9\r\n\r\n"
    answer = await served.talk(
        get("/", "Transfer-Encoding: chunked", method="POST") + body[:9], body[9:]
    )
    said = json.loads(parts(answer)[2])
    assert said["body"] == 11
    assert not any("Late" in line for line in said["lines"])


async def test_expect_continue(served) -> None:
    reader, writer = await served.open()
    writer.write(get("/", "Expect: 100-continue", "Content-Length: 3", method="POST"))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"abc")
    assert json.loads(parts(await reader.read())[2])["body"] == 3
    writer.close()
    # Behind a request that is still being answered, the permission waits for its turn.
    first = get("/slow", close=False)
    second = get("/", "Expect: 100-continue", "Content-Length: 3", method="POST")
    reader, writer = await served.open()
    writer.write(first + second)
    answer = await reader.readuntil(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK")
    writer.write(b"abc")
    assert json.loads(parts(await reader.read())[2])["body"] == 3
    writer.close()


async def test_targets_and_upgrades(served) -> None:
    said = json.loads(parts(await served.talk(get("http://a.example/x?y=1")))[2])
    assert (said["target"], said["path"]) == ("/x?y=1", "/x")
    upgrade = get("/", "Upgrade: h2c", "HTTP2-Settings: x", "Connection: Upgrade", close=False)
    data = await served.talk(upgrade + get("/second"))
    assert data.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 400, "InvalidInput"),
        (b"GET / HTTP/1.1\r\nBad Header: x\r\n\r\n", 400, "InvalidInput"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "InvalidInput"),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400, "InvalidInput"),
        (
            b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            400,
            "InvalidInput",
        ),
        (
            b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
            "InvalidInput",
        ),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 400, "InvalidInput"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "InvalidInput"),
        (b"GET x HTTP/1.1\r\n\r\n", 400, "InvalidInput"),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 405, "MethodNotAllowed"),
        (b"POST / HTTP/1.1\r\nContent-Length: 100001\r\n\r\n", 413, "BodyTooLarge"),
        (
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"8000\r\n%b\r\n" % (b"x" * 0x8000) * 4,
            413,
            "BodyTooLarge",
        ),
        (b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\n\r\n", 414, "TargetTooLong"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 9000 + b"\r\n\r\n", 431, "HeadTooLarge"),
        (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 51 + b"\r\n", 431, "HeadTooLarge"),
        (b"GET / HTTP/1.1\r\nExpect: cake\r\n\r\n", 417, "ExpectationFailed"),
        (b"GET / HTTP/1.1\r\nHost", 408, "RequestTimeout"),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nab", 408, "RequestTimeout"),
    ],
)
async def test_what_is_refused(served, sent, status, code) -> None:
    found, headers, body = parts(await served.talk(sent))
    assert found == status
    assert headers["Connection"] == "close"
    assert json.loads(body)["error"]["code"] == code
    await asyncio.wait_for(served.talk(get()), 2)


async def test_an_upgrade_with_a_body_is_one_request(served) -> None:
    """The body of a request that asks for an upgrade is its own, never a second request."""
    inner = get("/inner", close=False)
    ask = ["Connection: Upgrade", "Upgrade: h2c", "X-A: b"]
    sized = get("/a", *ask, f"Content-Length: {len(inner)}", method="POST", close=False) + inner
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner)
    chunked = get("/b", *ask, "Transfer-Encoding: chunked", method="POST", close=False) + chunk
    whole = sized + chunked + get("/c")
    for pieces in ((whole,), tuple(whole[i : i + 1] for i in range(len(whole)))):
        data = await served.talk(*pieces)
        said = [json.loads(p.partition(b"\r\n\r\n")[2]) for p in data.split(b"HTTP/1.1 200")[1:]]
        assert [(item["path"], item["body"]) for item in said] == [
            ("/a", len(inner)),
            ("/b", len(inner)),
            ("/c", 0),
        ]
        assert said[0]["lines"] == ["X-A: b\r\n"]


async def test_an_endless_header_is_cut_off_early(served) -> None:
    answer = await served.talk(b"GET / HTTP/1.1\r\nX: ", *[b"a" * 4000] * 4, pause_s=0.01)
    assert parts(answer)[0] == 431


async def test_endless_trailers_and_chunk_extensions_are_cut_off(served) -> None:
    begun = get("/", "Transfer-Encoding: chunked", method="POST") + b"1\r\na\r\n"
    for endless in (b"0\r\nX: ", b"1;x="):
        data = await served.talk(begun + endless, *[b"a" * 4096] * 5)
        assert parts(data)[0] == 431


async def test_slow_senders_are_ended(served) -> None:
    clock = asyncio.get_running_loop().time
    start = clock()
    drip = [b"GET / HTTP/1.1\r\n", *[b"X-a: b\r\n"] * 40]
    answers = await asyncio.gather(
        *(served.talk(*drip, pause_s=0.05) for _ in range(20)),
        served.talk(get("/", "Content-Length: 99", method="POST"), *[b"x"] * 40, pause_s=0.05),
    )
    assert {parts(answer)[0] for answer in answers} == {408}
    assert clock() - start < 4
    async with asyncio.timeout(3):
        while served.server.connections:
            await asyncio.sleep(0.005)


async def test_idle_connections_are_closed_without_a_word(served) -> None:
    assert await served.talk() == b""
    data = await served.talk(get(close=False))
    assert data.count(b"HTTP/1.1") == 1


async def test_bodies_in_memory_are_bounded(served) -> None:
    async def upload() -> int:
        head = get("/never", "Content-Length: 90000", method="POST")
        return parts(await served.talk(head, b"x" * 90000))[0]

    tasks = [asyncio.create_task(upload()) for _ in range(4)]
    done, running = await asyncio.wait(tasks, timeout=2, return_when=asyncio.FIRST_COMPLETED)
    assert {task.result() for task in done} == {429}
    for task in running:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_client_that_reads_nothing_is_given_up(served, caplog) -> None:
    gone = asyncio.Event()

    async def pour(request: Request, response: Response) -> None:
        response.begin(b"HTTP/1.1 200 OK\r\n", None)
        try:
            while True:
                response.write(b"x" * 65536)
                await response.drained()
                await asyncio.sleep(0)
        finally:
            gone.set()

    served.server.handler = pour
    _, writer = await served.open()
    writer.write(get())
    await asyncio.wait_for(gone.wait(), 5)
    writer.close()


async def test_a_client_that_reads_nothing_is_given_no_more_answers(served) -> None:
    """Answers to pipelined requests must not pile up in memory while nobody takes them."""
    answered = 0

    async def big(request: Request, response: Response) -> None:
        nonlocal answered
        answered += 1
        response.send(200, b"x" * 1_000_000)

    served.server.handler = big
    reader, writer = await served.open()
    writer.write(get(close=False) * 39 + get())
    await asyncio.sleep(0.2)
    assert answered < 12  # what the kernel's buffers hold, and one more
    got = 0
    while chunk := await reader.read(1 << 20):
        got += len(chunk)
    assert got > 40_000_000
    writer.close()


async def test_a_client_that_reads_slowly_is_not_given_up(served) -> None:
    """`write_stall_s` is how long no byte is taken, not how long an answer may take."""

    async def big(request: Request, response: Response) -> None:
        response.send(200, b"x" * 24_000_000)

    served.server.handler = big
    reader, writer = await served.open()
    writer.write(get())
    got = 0
    began = asyncio.get_running_loop().time()
    while chunk := await reader.read(1 << 20):
        got += len(chunk)
        await asyncio.sleep(0.02)
    assert got > 24_000_000
    assert asyncio.get_running_loop().time() - began > LIMITS.write_stall_s
    writer.close()


async def test_a_request_cancelled_before_it_began_frees_its_body() -> None:
    server = HttpServer(echo, limits=LIMITS, env=Env())
    connection = Connection(server)
    transport = unittest.mock.MagicMock(spec=asyncio.Transport)
    connection.connection_made(transport)
    connection.data_received(get("/", "Content-Length: 1000", method="POST") + b"x" * 1000)
    assert server.bodies_bytes == 1000
    connection.connection_lost(None)
    await asyncio.sleep(0)
    assert server.bodies_bytes == 0


async def test_a_bug_is_a_500_that_says_nothing(served, caplog) -> None:
    status, _, body = parts(await served.talk(get("/bug")))
    assert status == 500
    assert json.loads(body)["error"]["type"] == "InternalError"
    assert b"bug" not in body.replace(b"debug", b"")
    assert "handler failed" in caplog.text


async def test_a_client_that_leaves_cancels_its_handler(served) -> None:
    reader, writer = await served.open()
    writer.write(get("/never"))
    async with asyncio.timeout(3):
        while not any(c._task for c in served.server.connections):
            await asyncio.sleep(0.005)
        task = next(c._task for c in served.server.connections)
        writer.close()
        while not task.done():
            await asyncio.sleep(0.005)
    assert task.cancelled()
    assert reader is not None


async def test_closing_lets_running_requests_end() -> None:
    server = HttpServer(echo, limits=LIMITS, env=Env())
    served = Served(server, await server.start("127.0.0.1", 0))
    slow = asyncio.create_task(served.talk(get("/slow", close=False)))
    stuck = asyncio.create_task(served.talk(get("/never", close=False)))
    idle_reader, idle = await served.open()
    await asyncio.sleep(0.02)
    await server.close(0.2)
    status, headers, _ = parts(await slow)
    assert (status, headers.get("Connection")) in {(200, "close"), (200, None)}
    assert await stuck == b""
    assert await idle_reader.read() == b""
    idle.close()
    with pytest.raises(ConnectionError):
        await served.open()


async def test_a_taken_port_is_a_clear_error(served) -> None:
    other = HttpServer(echo, limits=LIMITS, env=Env())
    with pytest.raises(InvalidInput, match="choose a free port"):
        await other.start("127.0.0.1", served.port)


SEEDS = [
    get("/a?b=c", "X-One: 1", "Accept: */*"),
    get("/", "Content-Length: 11", "Content-Type: application/json", method="POST")
    + b'{"a": "b"}\n',
    get("/", "Transfer-Encoding: chunked", method="POST") + b"4\r\nabcd\r\n0\r\n\r\n",
    get("/x", close=False) + get("/y", "Expect: 100-continue", "Content-Length: 2") + b"ab",
    get("/", "Upgrade: websocket", "Connection: Upgrade", close=False),
]
BITS = [
    b"\r\n",
    b"\n",
    b"\x00",
    b":",
    b" ",
    b"\xff\xfe",
    b"HTTP/1.1",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"GET ",
]


def mutate(rng: random.Random) -> bytes:
    data = bytearray(rng.choice(SEEDS))
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            data[at:at] = rng.choice(BITS)
        elif kind == 1:
            del data[at : at + rng.randint(1, 12)]
        elif kind == 2 and at < len(data):
            data[at] = rng.randrange(256)
        else:
            data[at:at] = data[max(0, at - 20) : at]
    return bytes(data)


async def test_a_thousand_malformed_requests_harm_nobody(served, caplog) -> None:
    caplog.set_level(logging.WARNING)
    rng = random.Random(20260817)
    statuses: set[int] = set()

    async def one(data: bytes) -> None:
        reader, writer = await served.open()
        with contextlib.suppress(ConnectionError):
            cut = rng.randrange(len(data) + 1)
            writer.write(data[:cut])
            await writer.drain()
            writer.write(data[cut:])
            await writer.drain()
            writer.write_eof()
            answer = await reader.read()
            if answer:
                assert answer.startswith(b"HTTP/1.1 ")
                statuses.add(int(answer[9:12]))
        writer.close()

    for _ in range(50):
        async with asyncio.timeout(10):
            await asyncio.gather(*(one(mutate(rng)) for _ in range(20)))
    assert statuses <= {100, 200, 400, 405, 408, 413, 414, 417, 431}
    assert {200, 400} <= statuses
    assert "handler failed" not in caplog.text
    assert parts(await served.talk(get()))[0] == 200
    async with asyncio.timeout(5):
        while served.server.connections:
            await asyncio.sleep(0.01)
