"""`EngineProcess`: starts the embedded engine as a child process and ends it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from os import environ, getpid
from pathlib import Path
from typing import Any

from stitch.env import Env
from stitch.errors import EngineUnavailable, InvalidInput

__all__ = ["EngineProcess"]

_POLL_S = 0.02


@dataclass(slots=True)
class EngineProcess:
    """One engine child. It gets SIGKILL when the thread that spawned it ends (Linux PDEATHSIG),
    so spawn it from a thread that lives as long as the engine should."""

    child: subprocess.Popen[bytes]
    port: int
    log_path: Path
    env: Env

    @classmethod
    async def spawn(
        cls,
        model: Path | str,
        *,
        work_dir: Path,
        env: Env,
        port: int = 0,
        host: str = "127.0.0.1",
        arguments: Sequence[str] = (),
        deadline_s: float = 120.0,
    ) -> EngineProcess:
        """Start `python -m stitch.engines.embedded` and wait until it serves.

        Args:
            work_dir: existing directory for the log (`engine-<nonce>.log`) and the ready file.
            arguments: further flags of the engine's command line.
        Raises: InvalidInput if the engine refuses model, port or flags, with its one-line reason;
            EngineUnavailable if it dies or the deadline passes. No process is left behind.
        """
        nonce = env.random.nonce()
        log_path = work_dir / f"engine-{nonce}.log"
        ready_path = work_dir / f"engine-{nonce}.ready"
        command = [sys.executable, "-m", "stitch.engines.embedded"]
        command += ["--model", str(model), "--host", host, "--port", str(port)]
        command += ["--ready-file", str(ready_path), "--parent", str(getpid()), *arguments]
        child = _start(command, log_path)
        engine = cls(child, 0, log_path, env)
        try:
            async with env.clock.timeout(deadline_s):
                ready = await engine._wait_ready(ready_path)
        except TimeoutError as error:
            engine.kill()
            raise EngineUnavailable(
                f"the engine was not ready in {deadline_s:g} s; see {log_path}"
            ) from error
        except BaseException:
            engine.kill()
            raise
        finally:
            if env.files.exists(ready_path):
                env.files.unlink(ready_path)
        if "error" in ready:
            engine.kill()
            raise InvalidInput(f"engine: {ready['error']}")
        engine.port = int(ready["port"])
        return engine

    async def _wait_ready(self, path: Path) -> dict[str, Any]:
        while True:
            # Read the exit code first: what a dead child wrote is complete.
            code = self.child.poll()
            if self.env.files.exists(path):
                found = json.loads(self.env.files.read(path))
                return found if isinstance(found, dict) else {}
            if code is not None:
                raise EngineUnavailable(
                    f"the engine ended with code {code} before it was ready: "
                    f"{self.last_log_line() or 'no output'}; see {self.log_path}"
                )
            await self.env.clock.sleep(_POLL_S)

    @property
    def base_url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self.child.pid

    @property
    def alive(self) -> bool:
        """Whether the child runs (a stopped one does)."""
        return self.child.poll() is None

    def last_log_line(self) -> str:
        """The last non-empty line of the log."""
        lines = self.env.files.read(self.log_path).decode("utf-8", "replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to a live child (SIGSTOP and SIGCONT in tests)."""
        if self.alive:
            self.child.send_signal(number)

    async def terminate(self, *, grace_s: float = 5.0) -> int:
        """SIGTERM, then SIGKILL after `grace_s`. Returns the exit code; safe to repeat."""
        if self.alive:
            self.child.terminate()
            try:
                async with self.env.clock.timeout(grace_s):
                    while self.alive:
                        await self.env.clock.sleep(_POLL_S)
            except TimeoutError:
                self.child.kill()
        return self.child.wait()

    def kill(self) -> int:
        """SIGKILL and reap: on return the process is confirmed dead. Safe to repeat."""
        if self.alive:
            self.child.kill()
        return self.child.wait()


def _start(command: Sequence[str], log_path: Path) -> subprocess.Popen[bytes]:
    with log_path.open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )
