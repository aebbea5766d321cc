"""A file system in memory that forgets what was not synced.

The model is a strict reading of POSIX: bytes survive a crash only if the file was synced after
they were written; a created, linked, renamed or removed name survives only if its directory was
synced afterwards. What was not synced may survive or not, so a crash has several outcomes
(`Survival`), and a promise must hold in all of them. A rename within one directory is one step.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

__all__ = ["Call", "CrashFiles", "Survival"]

Buffer = bytes | bytearray | memoryview

# Frames below these files are what a call site is made of.
_SITE_FILES: Final = ("/stitch/stores/",)
_inodes = itertools.count(1)


class Survival(Enum):
    """What became of unsynced changes at a crash."""

    LOST = "lost"  # none survived
    TORN = "torn"  # all names survived, unsynced bytes are half there, then zeros
    MIXED = "mixed"  # chosen at random, per file and per directory


@dataclass(frozen=True, slots=True)
class Call:
    """One call into the file system, about to run. `site` is the chain of calling lines."""

    number: int
    operation: str
    path: Path
    site: str


@dataclass
class _File:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    number: int = field(default_factory=lambda: next(_inodes))
    changes: int = 0


@dataclass
class _Directory:
    names: dict[str, _File | _Directory] = field(default_factory=dict)
    # Name tables from the last sync to now, oldest first: a crash keeps one of them.
    history: list[dict[str, _File | _Directory]] = field(default_factory=lambda: [{}])

    def changed(self) -> None:
        self.history.append(dict(self.names))


class CrashFiles:
    """`Files` in memory, with crashes, a full disk, refusals, and ignored syncs.

    Args:
        on_call: told before each call runs; it may raise (the call then does not happen) or take
            `crashed(...)` copies.
        ignored: syncs from call sites for which it is true do nothing, as if deleted.
    """

    def __init__(
        self,
        *,
        on_call: Callable[[Call], None] | None = None,
        ignored: Callable[[str], bool] | None = None,
        free_bytes: int | None = None,
    ) -> None:
        self.on_call = on_call
        self.ignored = ignored
        self.free_bytes = free_bytes
        self.sync_sites: set[str] = set()
        self.call_count = 0
        self._root = _Directory()
        self._locks: dict[int, list[bool]] = {}

    # Crashing

    def crashed(self, survival: Survival, seed: int = 0) -> CrashFiles:
        """The file system as the next boot may find it. This one goes on untouched."""
        after = CrashFiles()
        chooser = random.Random(seed)
        kept: dict[int, _File] = {}

        def keep_file(file: _File) -> _File:
            if id(file) not in kept:
                kept[id(file)] = _File(bytearray(_surviving(file, survival, chooser)))
                kept[id(file)].durable = bytes(kept[id(file)].data)
            return kept[id(file)]

        def keep(directory: _Directory) -> _Directory:
            if survival is Survival.LOST:
                table = directory.history[0]
            elif survival is Survival.TORN:
                table = directory.names
            else:
                table = chooser.choice(directory.history)
            names = {
                name: keep(entry) if isinstance(entry, _Directory) else keep_file(entry)
                for name, entry in table.items()
            }
            return _Directory(names, [dict(names)])

        after._root = keep(self._root)
        return after

    def killed(self) -> CrashFiles:
        """The file system after the process died and the machine did not: locks are gone."""
        after = CrashFiles()
        after._root = self._root
        return after

    # Files

    def read(self, path: Path) -> bytes:
        """All bytes."""
        self._call("read", path)
        return bytes(self._file(path).data)

    def read_into(self, path: Path, offset: int, buffer: memoryview) -> int:
        """Positioned read."""
        self._call("read_into", path)
        data = self._file(path).data[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def size(self, path: Path) -> int | None:
        """Bytes of a file, or None."""
        entry = self._find(path)
        return len(entry.data) if isinstance(entry, _File) else None

    def fingerprint(self, path: Path) -> str | None:
        """File number and change count."""
        entry = self._find(path)
        if not isinstance(entry, _File):
            return None
        return f"{entry.number:x}-{entry.changes:x}-{len(entry.data):x}"

    def create(self, path: Path) -> _Handle:
        """A new, empty file."""
        self._call("create", path)
        directory = self._directory(path.parent)
        if path.name in directory.names:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        file = _File()
        directory.names[path.name] = file
        directory.changed()
        return _Handle(self, path, file)

    def sync_directory(self, path: Path) -> None:
        """Make the directory's names durable."""
        if self._sync_counts("sync_directory", path):
            directory = self._directory(path)
            directory.history = [dict(directory.names)]

    def rename(self, source: Path, target: Path) -> None:
        """Rename within one directory, as the store does; the only kind the model has."""
        self._call("rename", source)
        assert source.parent == target.parent, "renames across directories are not modelled"
        directory = self._directory(source.parent)
        if source.name not in directory.names:
            raise FileNotFoundError(errno.ENOENT, "no such name", str(source))
        standing = directory.names.get(target.name)
        if isinstance(standing, _Directory) and standing.names:
            raise OSError(errno.ENOTEMPTY, "not empty", str(target))
        directory.names[target.name] = directory.names.pop(source.name)
        directory.changed()

    def link(self, source: Path, target: Path) -> None:
        """A second name for one file."""
        self._call("link", target)
        file = self._file(source)
        directory = self._directory(target.parent)
        if target.name in directory.names:
            raise FileExistsError(errno.EEXIST, "exists", str(target))
        directory.names[target.name] = file
        directory.changed()

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""
        self._call("unlink", path)
        self._file(path)
        directory = self._directory(path.parent)
        del directory.names[path.name]
        directory.changed()

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and all below it; absent is fine."""
        self._call("remove_tree", path)
        if self._find(path) is not None:
            directory = self._directory(path.parent)
            del directory.names[path.name]
            directory.changed()

    def make_directory(self, path: Path) -> None:
        """A new, empty directory."""
        self._call("make_directory", path)
        parent = self._directory(path.parent)
        if path.name in parent.names:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        parent.names[path.name] = _Directory()
        parent.changed()

    def names(self, path: Path) -> list[str]:
        """Sorted names, empty if absent."""
        entry = self._find(path)
        return sorted(entry.names) if isinstance(entry, _Directory) else []

    def is_directory(self, path: Path) -> bool:
        """Whether a directory stands there."""
        return isinstance(self._find(path), _Directory)

    def exists(self, path: Path) -> bool:
        """Whether anything stands there."""
        return self._find(path) is not None

    def resolve(self, path: Path) -> Path:
        """There are no links in this model."""
        return path

    @contextlib.contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        """An exclusive lock; waiting would be a deadlock in one thread, so it is an error."""
        release = self.try_lock(path)
        assert release is not None, f"{path} is locked: a single thread would wait for ever"
        try:
            yield
        finally:
            release()

    def try_lock(self, path: Path, *, shared: bool = False) -> Callable[[], None] | None:
        """Lock what stands at `path`, or a lock file made there."""
        entry = self._find(path)
        if entry is None:
            directory = self._directory(path.parent)
            entry = directory.names[path.name] = _File()
            directory.changed()
        holders = self._locks.setdefault(id(entry), [])
        if holders and not (shared and all(holders)):
            return None
        holders.append(shared)

        def release() -> None:
            holders.remove(shared)

        return release

    # Inside

    def _call(self, operation: str, path: Path) -> str:
        site = _call_site() if self.on_call or operation.startswith("sync") else ""
        self.call_count += 1
        if self.on_call is not None:
            self.on_call(Call(self.call_count, operation, path, site))
        return site

    def _sync_counts(self, operation: str, path: Path) -> bool:
        site = self._call(operation, path)
        self.sync_sites.add(site)
        return self.ignored is None or not self.ignored(site)

    def _take_space(self, count: int, path: Path) -> None:
        if self.free_bytes is not None:
            if count > self.free_bytes:
                raise OSError(errno.ENOSPC, "no space", str(path))
            self.free_bytes -= count

    def _find(self, path: Path) -> _File | _Directory | None:
        entry: _File | _Directory | None = self._root
        for part in path.parts[1:]:
            if not isinstance(entry, _Directory):
                return None
            entry = entry.names.get(part)
        return entry

    def _file(self, path: Path) -> _File:
        entry = self._find(path)
        if not isinstance(entry, _File):
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return entry

    def _directory(self, path: Path) -> _Directory:
        entry = self._find(path)
        if not isinstance(entry, _Directory):
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(path))
        return entry


class _Handle:
    def __init__(self, files: CrashFiles, path: Path, file: _File) -> None:
        self._files = files
        self._path = path
        self._file = file

    def write(self, data: Buffer) -> None:
        self._files._call("write", self._path)
        raw = bytes(memoryview(data).cast("B")) if memoryview(data).nbytes else b""
        self._files._take_space(len(raw), self._path)
        self._file.data += raw
        self._file.changes += 1

    def sync(self) -> None:
        if self._files._sync_counts("sync", self._path):
            self._file.durable = bytes(self._file.data)

    def close(self) -> None:
        self._files._call("close", self._path)


def _surviving(file: _File, survival: Survival, chooser: random.Random) -> bytes:
    data, durable = bytes(file.data), file.durable
    if data == durable or survival is Survival.LOST:
        return durable
    if survival is Survival.MIXED and chooser.random() < 0.5:
        return chooser.choice([durable, data])
    kept = len(durable) + (len(data) - len(durable)) // 2
    return data[:kept] + bytes(len(data) - kept)


def _call_site() -> str:
    """The lines of our own code that led here, outermost first."""
    lines: list[str] = []
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in _SITE_FILES) and "/testing/" not in name:
            short = name.rsplit("/", 2)
            lines.append(f"{short[-2]}/{short[-1]}:{frame.f_lineno}")
        if frame.f_back is None:
            break
        frame = frame.f_back
    return " < ".join(lines)
