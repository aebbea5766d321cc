"""A scripted engine server on a real socket, for tests of what stands in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from typing import Any

import orjson

from stitch.types import Label

__all__ = ["SAMPLING", "FakeEngineServer", "Seen"]

SAMPLING = ("/generate", "/v1/completions", "/v1/chat/completions")


class Seen:
    """One request as the engine server received it."""

    def __init__(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body

    @property
    def json(self) -> dict[str, Any]:
        """The body as JSON."""
        parsed: dict[str, Any] = orjson.loads(self.body or b"{}")
        return parsed


class FakeEngineServer:
    """Answers on a real socket. A sampling request's `fake` object scripts its answer:

    kind: json (default), chunked, close, gzip, sse, no_content, die_before, die_in_head,
        die_in_body, die_in_stream, bad_status, silent.
    delay_s: before the head. gap_s: between stream events. tokens: stream events.
    size: bytes of text. split: whether the head and body come in many small writes.
    """

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.aborted: list[str] = []
        self.running: set[str] = set()
        self.label: Label | None = None
        self.connections = 0
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._stops: dict[str, asyncio.Event] = {}
        self._server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> int:
        """Listen on a port of the loopback."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self.port

    async def close(self) -> None:
        """Stop at once, as a killed process would."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    def abort(self, rid: str) -> None:
        """End one generation."""
        self.aborted.append(rid)
        if rid in self._stops:
            self._stops[rid].set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                seen = await _read_request(reader)
                self.seen.append(seen)
                if not await self._answer(seen, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except asyncio.CancelledError:
            return
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        path = seen.target.partition("?")[0]
        if path == "/metrics":
            return _whole(writer, b"# TYPE fake counter\nfake 1\n", b"text/plain")
        if path not in SAMPLING:
            return _whole(writer, b"raw:" + seen.target.encode(), b"application/x-raw")
        script = dict(seen.json.get("fake") or {})
        rid = str(seen.json.get("rid"))
        self.running.add(rid)
        self._stops[rid] = asyncio.Event()
        try:
            await self._pause(rid, float(script.get("delay_s", 0)))
            return await self._generate(path, rid, script, writer)
        finally:
            self.running.discard(rid)
            self._stops.pop(rid, None)

    async def _pause(self, rid: str, seconds: float) -> bool:
        """Wait; True if the generation was aborted meanwhile."""
        if seconds <= 0:
            return self._stops[rid].is_set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stops[rid].wait()
                return True
        return False

    async def _generate(
        self, path: str, rid: str, script: dict[str, Any], writer: asyncio.StreamWriter
    ) -> bool:
        kind = str(script.get("kind", "json"))
        if kind == "silent":
            await self._pause(rid, 3600)
        if kind == "die_before":
            writer.transport.abort()
            return False
        if kind in ("sse", "die_in_stream"):
            return await self._stream(rid, script, writer)
        body = orjson.dumps(self._result(path, rid, "x" * int(script.get("size", 10))))
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Engine: fake\r\n"
        sized = b"Content-Length: %d\r\n\r\n" % len(body)
        if kind == "die_in_head":
            writer.write(head)
        elif kind == "die_in_body":
            writer.write(head + sized + body[: len(body) // 2])
        elif kind == "bad_status":
            writer.write(b"HTTP/1.1 banana\r\n\r\n")
        elif kind == "close":
            writer.write(head.replace(b"1.1", b"1.0", 1) + b"\r\n" + body)
        elif kind == "no_content":
            writer.write(b"HTTP/1.1 204 No Content\r\nX-Engine: fake\r\n\r\n")
            return True
        elif kind == "gzip":
            packed = gzip.compress(body, mtime=0)
            head += b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
            await _write(writer, head + packed, script)
            return True
        elif kind == "chunked":
            head += b"Transfer-Encoding: chunked\r\nKeep-Alive: timeout=5\r\n\r\n"
            await _write(writer, head + _chunks(body, 1000) + b"0\r\n\r\n", script)
            return True
        else:
            await _write(writer, head + sized + body, script)
            return True
        await writer.drain()
        return False

    async def _stream(self, rid: str, script: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        tokens = int(script.get("tokens", 3))
        reason = "length"
        for index in range(tokens):
            if await self._pause(rid, float(script.get("gap_s", 0))):
                reason = "abort"
                break
            event = b"data: %b\n\n" % orjson.dumps({"text": "t" * (index + 1), "index": index})
            if script["kind"] == "die_in_stream" and index == tokens - 1:
                writer.write(b"%x\r\n%b" % (len(event), event[:9]))
                await writer.drain()
                return False
            writer.write(_chunks(event, 65536))
            await writer.drain()
        last = self._result("/generate", rid, "t" * tokens)
        last["meta_info"]["finish_reason"] = {"type": reason}
        tail = b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(last)
        writer.write(_chunks(tail, 65536) + b"0\r\n\r\n")
        await writer.drain()
        return True

    def _result(self, path: str, rid: str, text: str) -> dict[str, Any]:
        stopped = rid in self._stops and self._stops[rid].is_set()
        reason = {"type": "abort" if stopped else "length"}
        result: dict[str, Any] = {"text": text, "meta_info": {"id": rid, "finish_reason": reason}}
        if self.label is not None:
            result["meta_info"]["weight_version"] = str(self.label.ref.version)
        return result


def _whole(writer: asyncio.StreamWriter, body: bytes, content_type: bytes) -> bool:
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
        % (content_type, len(body), body)
    )
    return True


def _chunks(data: bytes, size: int) -> bytes:
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


async def _write(writer: asyncio.StreamWriter, data: bytes, script: dict[str, Any]) -> None:
    step = 7 if script.get("split") else len(data)
    for at in range(0, len(data), step):
        writer.write(data[at : at + step])
        if step == 7:
            await asyncio.sleep(0)
    await writer.drain()


async def _read_request(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *rest = head.split("\r\n")
    method, target, _ = line.split(" ", 2)
    headers = {}
    for item in rest:
        name, _, value = item.partition(": ")
        if name:
            headers[name.lower()] = value
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Seen(method, target, headers, body)
