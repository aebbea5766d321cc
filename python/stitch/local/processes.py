"""Child processes of a local pool: started by one long-lived thread, logged, never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from stitch.errors import Unavailable

__all__ = ["Child", "Spawner", "Warden", "last_lines"]

_HERE: Final = Path(__file__).parent
_TAIL_BYTES: Final = 16 * 1024


@dataclass(slots=True)
class Child:
    """One process and where its output goes: to the end of a log, from `log_start` on."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    log_start: int

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs (a stopped one does)."""
        return self.process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL and reap. Safe to repeat."""
        self.send(signal.SIGKILL)
        self.process.wait()

    def end(self, *, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; reaped on return."""
        self.send(signal.SIGTERM)
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()


class Spawner:
    """Starts children from one thread, which lives until `close`: Linux ties the death signal of
    a child to the thread that made it, so a caller's short-lived thread must not be that one."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stitch-spawner")

    def spawn(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_path: Path,
        environment: Mapping[str, str],
    ) -> Child:
        """Start `command` with its output appended to `log_path`. It dies with this process."""
        return self._thread.submit(_start, name, command, log_path, environment).result()

    def close(self) -> None:
        """End the thread. Children that still run get SIGKILL."""
        self._thread.shutdown(wait=True)


def _start(
    name: str, command: Sequence[str], log_path: Path, environment: Mapping[str, str]
) -> Child:
    launch = [sys.executable, "-I", "-S", str(_HERE / "launch.py"), str(os.getpid())]
    with log_path.open("ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            [*launch, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    return Child(name, process, log_path, log_start)


class Warden:
    """The process that removes a pool's directories should this one be killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_HERE / "warden.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def watch_directory(self, path: Path) -> None:
        """Have `path` removed if this process dies."""
        self._say(f"dir {path}")

    def watch_process(self, pid: int) -> None:
        """Have the removal wait for the end of `pid`."""
        self._say(f"pid {pid}")

    def dismiss(self) -> None:
        """Everything is cleaned up: end the warden. Safe to repeat."""
        if self._process.poll() is None:
            self._say("bye")
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        pipe: IO[str] | None = self._process.stdin
        if pipe is None or "\n" in line:
            raise Unavailable(f"the warden cannot be told {line!r}")
        with contextlib.suppress(OSError):  # without it, the death signals still end processes
            pipe.write(line + "\n")
            pipe.flush()


def last_lines(path: Path, count: int = 8) -> str:
    """The last lines of a log, indented; a note where there are none."""
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        text = ""
    lines = [line for line in text.splitlines() if line.strip()][-count:]
    return "\n".join(f"    {line}" for line in lines) or "    (the log is empty)"
