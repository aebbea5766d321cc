"""One replica of a local pool: its processes, its address, and how it describes itself."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stitch.local.probe import probe
from stitch.local.processes import Child

__all__ = ["LocalReplica", "ready_facts", "wait_gone"]


@dataclass(slots=True)
class LocalReplica:
    """One replica of the pool: a sidecar process and the engine process under it."""

    id: str
    child: Child = field(repr=False)
    url: str
    ready_path: Path = field(repr=False)
    work_dir: Path = field(repr=False)
    ram_dir: Path = field(repr=False)
    leaving: bool = field(default=False, repr=False)

    @property
    def pid(self) -> int:
        """The sidecar's process id."""
        return self.child.pid

    @property
    def engine_pid(self) -> int | None:
        """The engine's process id; changes when the sidecar restarts it."""
        found = ready_facts(self.ready_path).get("engine_pid")
        return int(found) if found is not None else None

    @property
    def alive(self) -> bool:
        """Whether the sidecar process runs."""
        return self.child.exit_code is None

    @property
    def log_path(self) -> Path:
        """The sidecar's log."""
        return self.child.log_path

    @property
    def state(self) -> str:
        """READY, CATCHING_UP … as the replica says; DEAD without a process; SILENT without an
        answer."""
        if not self.alive:
            return "DEAD"
        info = self.server_info()
        return "SILENT" if info is None else str(info.get("state", "SILENT"))

    def server_info(self) -> dict[str, Any] | None:
        """The replica's own `/server_info`, or None if it does not answer."""
        found = probe(self.url, "/server_info") if self.url else None
        return found[1] if found is not None and isinstance(found[1], dict) else None


def ready_facts(path: Path) -> dict[str, Any]:
    """What `stitch replica serve --ready-file` wrote; empty before that."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def wait_gone(pid: int | None, *, deadline_s: float = 10.0) -> None:
    """Wait for the end of a killed sidecar's engine, which comes a moment after its own."""
    proc = Path(f"/proc/{pid}")
    if pid is None:
        return
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while _runs(proc) and time.monotonic() < end:
        pause.wait(0.01)


def _runs(proc: Path) -> bool:
    try:
        status = (proc / "stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in {"Z", "X"}
