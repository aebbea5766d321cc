"""A directory that appears complete or not at all.

It is written under a sibling name, synced, and renamed. The writer holds a lock on the sibling
itself, so that a later run can tell what a dead process left behind from what a live one writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stitch.env import Env
from stitch.errors import InvalidInput

__all__ = ["atomic_directory", "remove_left_overs"]

_PREFIX: Final = ".stitch-tmp-"
_NONCE = re.compile(r"[0-9a-f]{16}")
_OPEN_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE_TRIES: Final = 16


@contextlib.contextmanager
def atomic_directory(out: Path, env: Env) -> Iterator[Path]:
    """Yield an empty directory; on success it becomes `out`, on an exception it is removed.

    Files written into it must be synced by the caller; the directory and its parent are synced
    here. What dead runs for the same `out` left behind is removed first.
    Raises: InvalidInput if `out` exists, even as a broken link, or its parent is no directory;
        OSError.
    """
    files = env.files
    parent = out.absolute().parent
    if not files.is_directory(parent):
        raise InvalidInput(f"{parent} is not a directory; create it first", file=str(parent))
    _refuse_existing(out)
    remove_left_overs(out, env)
    descriptor, temporary = _create_locked(parent, out.name, env)
    written = temporary
    try:
        yield temporary
        files.sync_directory(temporary)
        _refuse_existing(out)
        files.rename(temporary, parent / out.name)
        written = parent / out.name
        files.sync_directory(parent)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove_tree(written)
        raise
    finally:
        os.close(descriptor)


def remove_left_overs(out: Path, env: Env) -> list[Path]:
    """Remove siblings that crashed runs for `out` left. One that a live process holds stays."""
    parent = out.absolute().parent
    prefix = f"{_PREFIX}{out.name}-"
    removed = []
    for name in env.files.names(parent):
        if not name.startswith(prefix) or not _NONCE.fullmatch(name[len(prefix) :]):
            continue
        descriptor = _try_lock(parent / name)
        if descriptor is None:
            continue
        try:
            env.files.remove_tree(parent / name)
            removed.append(parent / name)
        finally:
            os.close(descriptor)
    return removed


def _refuse_existing(out: Path) -> None:
    if os.path.lexists(out):
        raise InvalidInput(f"{out} exists; give a name that is free", file=str(out))


def _create_locked(parent: Path, name: str, env: Env) -> tuple[int, Path]:
    for _ in range(_CREATE_TRIES):
        temporary = parent / f"{_PREFIX}{name}-{env.random.nonce()}"
        env.files.make_directory(temporary)
        try:
            descriptor = os.open(temporary, _OPEN_FLAGS)
        except FileNotFoundError:
            continue  # a cleaner saw the directory before it was locked, and removed it
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)  # a cleaner is removing it
            continue
        except OSError:
            # No directory locks here (some network file systems): cleaners cannot lock it
            # either and leave it alone.
            return descriptor, temporary
        if temporary.is_dir():
            return descriptor, temporary
        os.close(descriptor)
    raise OSError(f"no temporary directory could be kept beside {name}")


def _try_lock(path: Path) -> int | None:
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
