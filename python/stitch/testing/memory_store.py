"""A Store in memory: what an object store looks like, without local files. For tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stitch.checksum import blake3
from stitch.errors import Conflict, InvalidInput, NotVisibleYet, Unavailable
from stitch.stores.base import (
    INDEX_NAME,
    Lost,
    ObjectInfo,
    PointerRead,
    Sealed,
    StoreCapabilities,
    SwapResult,
    Won,
)
from stitch.stores.keys import check_attempt, check_key, check_lease_name, check_name

__all__ = ["Cells", "MemoryStaging", "MemoryStore"]

Buffer = bytes | bytearray | memoryview


@dataclass
class Cells:
    """What a root holds. Several `MemoryStore`s on one `Cells` are several clients."""

    pointer: tuple[str, str] | None = None  # text and token
    swaps: int = 0
    objects: dict[str, tuple[bytes, str]] = field(default_factory=dict)  # bytes and token
    written: int = 0
    staged: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    leases: dict[str, bytes] = field(default_factory=dict)


class MemoryStore:
    """Keeps every promise of the Store protocol; methods never yield, so all are atomic."""

    def __init__(self, cells: Cells | None = None, *, free_bytes: int | None = None) -> None:
        self.cells = cells if cells is not None else Cells()
        self.free_bytes = free_bytes
        self._closed = False

    @property
    def url(self) -> str:
        """A name for messages; it cannot be opened again."""
        return "memory:"

    @property
    def capabilities(self) -> StoreCapabilities:
        """No local files."""
        return StoreCapabilities(True, True, True, False, False)

    async def read_pointer(self) -> PointerRead:
        """The pointer as it stands."""
        self._check_open()
        pointer = self.cells.pointer
        return PointerRead("", None) if pointer is None else PointerRead(*pointer)

    async def swap_pointer(self, expect: str | None, text: str) -> SwapResult:
        """Compare and set."""
        self._check_open()
        found = await self.read_pointer()
        if found.token != expect:
            return Lost(found.text, found.token)
        self.cells.swaps += 1
        token = f"{self.cells.swaps}-{blake3(text.encode())[:16]}"
        self.cells.pointer = (text, token)
        return Won(token)

    async def create(self, key: str, data: bytes) -> bool:
        """Create-only."""
        self._check_open()
        if check_key(key) in self.cells.objects:
            return False
        self.put_object(key, data)
        return True

    def put_object(self, key: str, data: bytes) -> None:
        """Write bytes under a fresh token."""
        if self.free_bytes is not None:
            if len(data) > self.free_bytes:
                raise Unavailable("the store is full: free space, then publish again")
            self.free_bytes -= len(data)
        self.cells.written += 1
        self.cells.objects[key] = (bytes(data), f"o{self.cells.written}")

    async def read(self, key: str, *, size_max: int) -> bytes | None:
        """The whole object."""
        self._check_open()
        found = self.cells.objects.get(check_key(key))
        if found is not None and len(found[0]) > size_max:
            raise InvalidInput(f"{key} has {len(found[0])} bytes; at most {size_max} are read")
        return None if found is None else found[0]

    async def stat(self, key: str) -> ObjectInfo | None:
        """Size and token."""
        self._check_open()
        found = self.cells.objects.get(check_key(key))
        return None if found is None else ObjectInfo(len(found[0]), found[1])

    async def read_into(
        self, key: str, offset: int, buffer: memoryview, *, expect_token: str | None = None
    ) -> int:
        """A range of the object."""
        self._check_open()
        found = self.cells.objects.get(check_key(key))
        if offset < 0:
            raise InvalidInput(f"offset {offset} is negative")
        if found is None:
            raise NotVisibleYet(f"{key} is not in the store", key=key)
        if expect_token is not None and found[1] != expect_token:
            raise Conflict(f"{key} is not the object that was looked up before", key=key)
        chunk = found[0][offset : offset + len(buffer)]
        buffer[: len(chunk)] = chunk
        return len(chunk)

    async def list(self, prefix: str) -> Sequence[str]:
        """Keys below `prefix`."""
        self._check_open()
        check_key(prefix, empty_allowed=True)
        inside = f"{prefix}/" if prefix else ""
        return sorted(key for key in self.cells.objects if key.startswith(inside))

    async def delete(self, key: str) -> None:
        """Remove one object, never an index."""
        self._check_open()
        if check_key(key).rsplit("/", 1)[-1] == INDEX_NAME:
            raise InvalidInput(f"{key} is the commit of a version and is kept for ever")
        self.cells.objects.pop(key, None)

    async def begin(self, prefix: str, *, attempt: str) -> MemoryStaging:
        """Begin or join an attempt."""
        self._check_open()
        key = (check_key(prefix), check_attempt(attempt))
        self.cells.staged.setdefault(key, {})
        return MemoryStaging(self, *key)

    async def confirm(self, prefix: str) -> bool:
        """Whether the index is there."""
        self._check_open()
        return f"{check_key(prefix)}/{INDEX_NAME}" in self.cells.objects

    def local_path(self, key: str) -> Path | None:
        """There are no local files."""
        return None

    async def write_lease(self, name: str, data: bytes) -> None:
        """Create or replace."""
        self._check_open()
        self.cells.leases[check_lease_name(name)] = bytes(data)

    async def read_leases(self) -> dict[str, bytes]:
        """A copy of all leases."""
        self._check_open()
        return dict(self.cells.leases)

    async def drop_lease(self, name: str) -> None:
        """Remove one."""
        self._check_open()
        self.cells.leases.pop(check_lease_name(name), None)

    async def close(self) -> None:
        """Refuse further calls."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the store is closed")


class MemoryStaging:
    """One attempt; its files are in `Cells.staged` until the seal."""

    def __init__(self, store: MemoryStore, prefix: str, attempt: str) -> None:
        self.store = store
        self.prefix = prefix
        self.attempt = attempt
        self._ended = False

    @property
    def files(self) -> dict[str, bytes] | None:
        """What the attempt wrote; None once it has ended."""
        return self.store.cells.staged.get((self.prefix, self.attempt))

    async def put(self, name: str, chunks: Iterable[Buffer]) -> int:
        """Keep one file."""
        files = self.files
        if name == INDEX_NAME:
            raise InvalidInput(f"{INDEX_NAME} is written by the seal alone", param="name")
        if files is None or self._ended:
            raise Conflict(f"the attempt at {self.prefix} has ended", prefix=self.prefix)
        if check_name(name) in files:
            raise Conflict(f"this attempt already wrote {name}", file=name)
        data = b"".join(bytes(chunk) for chunk in chunks)
        if self.store.free_bytes is not None and len(data) > self.store.free_bytes:
            raise Unavailable("the store is full: free space, then publish again")
        files[name] = data
        return len(data)

    async def seal(self, index: bytes) -> Sealed:
        """All at once, unless the name is sealed."""
        files = self.files
        if files is None or self._ended:
            if await self.store.confirm(self.prefix):
                return Sealed(self.prefix, False)
            raise Conflict(f"the attempt at {self.prefix} has ended", prefix=self.prefix)
        created = f"{self.prefix}/{INDEX_NAME}" not in self.store.cells.objects
        if created:
            for name, data in {**files, INDEX_NAME: bytes(index)}.items():
                self.store.put_object(f"{self.prefix}/{name}", data)
        await self.abandon()
        return Sealed(self.prefix, created)

    async def abandon(self) -> None:
        """Forget the staged files."""
        if not self._ended:
            self.store.cells.staged.pop((self.prefix, self.attempt), None)
            self._ended = True

    async def leave(self) -> None:
        """Keep them for whoever seals."""
        self._ended = True
