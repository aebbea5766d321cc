"""The process machinery of a local pool: who dies with whom, and what is swept."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from stitch.errors import InvalidInput
from stitch.local import LocalPool, LocalReplica
from stitch.local.probe import probe
from stitch.local.processes import Child, Spawner, Warden, last_lines

LONG = ["sleep", "60"]


def start(spawner: Spawner, tmp_path: Path, command: list[str]) -> Child:
    return spawner.spawn("child", command, log_path=tmp_path / "child.log", environment={"A": "b"})


def test_a_replica_is_shown_by_name_and_address(tmp_path: Path) -> None:
    child: Any = None
    replica = LocalReplica("replica-0", child, "http://127.0.0.1:1", tmp_path, tmp_path, tmp_path)
    assert repr(replica) == "LocalReplica(id='replica-0', url='http://127.0.0.1:1')"


def test_a_child_outlives_the_thread_that_asked_for_it_and_not_the_spawner(tmp_path: Path) -> None:
    spawner = Spawner()
    found: list[Child] = []
    asking = threading.Thread(target=lambda: found.append(start(spawner, tmp_path, LONG)))
    asking.start()
    asking.join()
    (child,) = found
    with pytest.raises(TimeoutError):
        wait(child, 0.3)
    spawner.close()
    assert wait(child, 10) == -9


def wait(child: Child, seconds: float) -> int:
    import subprocess

    try:
        return child.process.wait(seconds)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError from error


def test_output_and_environment_reach_the_log(tmp_path: Path) -> None:
    spawner = Spawner()
    child = start(spawner, tmp_path, ["sh", "-c", "echo out $A; echo err >&2; exit 3"])
    assert wait(child, 10) == 3
    assert child.exit_code == 3
    assert last_lines(child.log_path) == "    out b\n    err"
    child.kill()  # safe when it has ended
    child.end(grace_s=0.1)
    spawner.close()


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    spawner = Spawner()
    child = start(spawner, tmp_path, ["sh", "-c", "trap '' TERM; echo up; sleep 3 & wait; wait"])
    while "up" not in last_lines(child.log_path):
        threading.Event().wait(0.01)
    child.end(grace_s=0.2)
    assert child.exit_code == -9
    spawner.close()


def test_the_last_lines_of_no_log(tmp_path: Path) -> None:
    assert "empty" in last_lines(tmp_path / "absent")


@pytest.mark.parametrize("dismissed", [True, False])
def test_the_warden_sweeps_only_after_a_death(tmp_path: Path, dismissed: bool) -> None:
    directory = tmp_path / "left"
    (directory / "deep").mkdir(parents=True)
    warden = Warden()
    warden.watch_directory(directory)
    warden.watch_process(2**22 + 1)  # above the greatest process id: long gone
    if dismissed:
        warden.dismiss()
        warden.dismiss()
        assert directory.exists()
        return
    pipe = warden._process.stdin
    assert pipe is not None
    pipe.close()  # what the kernel does when the owner is killed
    warden._process.wait(20)
    assert not directory.exists()


def test_a_probe_of_nobody_is_none() -> None:
    assert probe("http://127.0.0.1:1", "/health", deadline_s=0.5) is None


def test_a_pool_needs_a_replica(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="at least one"):
        LocalPool(tmp_path, store=tmp_path, replicas=0)


def test_a_pool_that_never_started_closes(tmp_path: Path) -> None:
    LocalPool(tmp_path, store=tmp_path).close()
