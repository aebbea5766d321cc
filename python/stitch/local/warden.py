"""Removes what a pool leaves on disk and in memory when its owner is killed.

Usage: python -I -S warden.py, with the owner holding the other end of standard input.
Lines: `dir PATH` names a directory to remove, `pid N` a process to wait for first, `bye` says
that the owner has cleaned up itself. End of file without `bye` means that the owner died; its
processes die with it by their death signals. Standard library only, and out of the owner's
session, so that an interrupt of the terminal does not reach it.
"""

import os
import shutil
import sys
import time

_WAIT_S = 10.0
_PAUSE_S = 0.05


def main() -> None:
    """Follow the owner's lines to their end, then act."""
    directories: list[str] = []
    pids: set[int] = set()
    for line in sys.stdin:
        word, _, rest = line.rstrip("\n").partition(" ")
        if word == "bye":
            return
        if word == "dir":
            directories.append(rest)
        elif word == "pid":
            pids.add(int(rest))
    end = time.monotonic() + _WAIT_S
    while any(_alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(_PAUSE_S)
    for _ in range(5):
        # Grandchildren (engines) end a moment after their parents and may still write.
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
        time.sleep(_PAUSE_S)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
