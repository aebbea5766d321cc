"""LocalPool with real processes: publish, converge, kill, add, remove, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

import stitch
from stitch.cli import main as cli_main
from stitch.client import Client
from stitch.engines.embedded.tiny import write_tiny_model
from stitch.errors import Unavailable
from stitch.format.checkpoint import Checkpoint
from stitch.format.tensors import RawTensor
from stitch.local import LocalPool, LocalReplica
from stitch.publisher import Publisher

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(240)]

RUN = "run-a"
QUICK = ("--poll-s", "1")
STREAM_TOKENS = 150


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "base"
    write_tiny_model(directory, seed=3, hidden_size=32, layers=2)
    return directory


def weights(model: Path) -> dict[str, RawTensor]:
    """The base's tensors in writable copies."""
    with Checkpoint.open(model) as held:
        return {
            name: RawTensor(name, t.dtype, tuple(t.shape), bytearray(held.view(name)))
            for name, t in held.tensors.items()
        }


def nudge(tensors: dict[str, RawTensor], version: int) -> dict[str, RawTensor]:
    """Flip low mantissa bits of one matrix: other weights, still finite."""
    name = sorted(tensors)[version % len(tensors)]
    data = np.frombuffer(tensors[name].data, np.uint16).copy()
    data[version % 7 :: 7] ^= 1
    tensors[name] = RawTensor(name, tensors[name].dtype, tensors[name].shape, data.tobytes())
    return tensors


def until(done: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "the deadline passed"
        time.sleep(0.05)


def family(pool: LocalPool) -> list[psutil.Process]:
    """Every process of the pool: children, and the engines under them."""
    return psutil.Process().children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def traces() -> set[Path]:
    """What pools keep outside the test's own directory."""
    import tempfile

    places = (Path(tempfile.gettempdir()), Path("/dev/shm"))
    return {path for place in places for path in place.glob("stitch-*")}


@pytest.fixture
def clean() -> Iterator[None]:
    before = traces()
    yield
    # Other pools of this machine may come and go: only what a pool of ours would be named counts.
    left = {path for path in traces() - before if path.name.startswith("stitch-pool-")}
    assert not [path for path in left if path.stat().st_uid == os.getuid() and is_ours(path)]


def is_ours(path: Path) -> bool:
    """Whether no other live process works in it (other tests may run pools at the same time)."""
    for process in psutil.process_iter(["cmdline"]):
        if any(str(path) in part for part in process.info["cmdline"] or ()):
            return False
    return True


def served(replica: LocalReplica) -> int | None:
    info = replica.server_info()
    return None if info is None or info["served"] is None else info["served"]["version"]


def stream(client: Client, number: int) -> int:
    """One long stream; returns how many tokens came."""
    chunks = client.generate(
        f"{number}",
        sampling={"max_new_tokens": STREAM_TOKENS, "ignore_eos": True},
        stream=True,
    )
    return sum(len(chunk.output_ids) for chunk in chunks)


def running(replica: LocalReplica) -> int:
    info = replica.server_info()
    return 0 if info is None else int(info["active_requests"])


def test_a_pool_follows_loses_gains_and_vanishes(
    model: Path, tmp_path: Path, clean: None, capsys: pytest.CaptureFixture[str]
) -> None:
    store = (tmp_path / "store").as_uri()
    with LocalPool(model, store=store, replicas=2, run_id=RUN, replica_arguments=QUICK) as pool:
        processes = family(pool)
        assert [r.state for r in pool.replicas] == ["READY", "READY"]
        with (
            Publisher(store, run_id=RUN, base=model, pool=pool.pool) as publisher,
            Client(pool.url) as client,
        ):
            tensors = weights(model)
            for version in (1, 2):
                publisher.publish(nudge(tensors, version)).wait(30)
            assert publisher.wait_live(2, replicas=2, timeout=30).enough
            done = client.generate(
                "1 + 1 =",
                constraint=stitch.at_least(2),
                sampling={"max_new_tokens": 4, "ignore_eos": True},
            )
            assert {span.ref for span in done.spans} == {stitch.Ref(RUN, 2)}

            # A dead replica blocks neither a publication nor the convergence of the others.
            victim = pool.kill(0)
            assert victim.state == "DEAD"
            publisher.publish(nudge(tensors, 3)).wait(30)
            publisher.publish(nudge(tensors, 4)).wait(30)
            assert publisher.wait_live(4, replicas=1, timeout=30).enough
            assert client.generate("2", constraint=stitch.exactly(4)).version_start == 4

            joiner = pool.add()
            assert served(joiner) == 4, "a joiner is ready only once it has caught up"
            assert [r.id for r in pool.replicas] == ["replica-1", "replica-2"]

            # Leaving: streams that run are not cut, and new requests go elsewhere.
            with ThreadPoolExecutor(8) as threads:
                streams = [threads.submit(stream, client, number) for number in range(8)]
                until(lambda: sum(running(r) for r in pool.replicas) >= 4)
                leaver = pool.remove("replica-1")
                assert [future.result(60) for future in streams] == [STREAM_TOKENS] * 8
            assert leaver.child.exit_code == 0
            # One replica is below three quarters of the floor of two.
            assert cli_main(["status", "--gateway", pool.url, "--store", store]) == 1
            shown = capsys.readouterr().out
            assert "1 of 2 replicas ready" in shown
            assert f"pointer  {RUN}/weight_v000004" in shown
            assert "replica-2  READY" in shown
            assert client.generate("3", constraint=stitch.at_least(4)).version_start == 4
        processes += family(pool)
        directories = [pool.log_dir, joiner.work_dir, joiner.ram_dir]
    assert gone(processes)
    assert not any(path.exists() for path in directories)


def test_a_stopped_engine_holds_nobody_back_and_recovers(model: Path, tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    with (
        LocalPool(model, store=store, replicas=2, run_id=RUN, replica_arguments=QUICK) as pool,
        Publisher(store, run_id=RUN, base=model, pool=pool.pool) as publisher,
        Client(pool.url) as client,
    ):
        tensors = weights(model)
        stopped, other = pool.replicas
        engine_pid = stopped.engine_pid
        assert engine_pid is not None
        os.kill(engine_pid, signal.SIGSTOP)
        try:
            publisher.publish(nudge(tensors, 1)).wait(30)
            until(lambda: served(other) == 1)
            assert client.generate("x", constraint=stitch.exactly(1)).version_start == 1
            assert served(stopped) != 1, "reported before it was active"
        finally:
            os.kill(engine_pid, signal.SIGCONT)
        until(lambda: served(stopped) == 1 and stopped.state == "READY", 90)
        assert stopped.engine_pid == engine_pid, "it recovered without a new engine"

        # An engine that dies is started again by its sidecar, from the newest bytes held.
        os.kill(engine_pid, signal.SIGKILL)
        until(lambda: stopped.engine_pid not in (None, engine_pid), 60)
        publisher.publish(nudge(tensors, 2)).wait(30)
        until(lambda: served(stopped) == 2 and stopped.state == "READY", 60)


OWNER = """
import sys, time
from stitch.local import LocalPool
with LocalPool(sys.argv[1], store=sys.argv[2], replicas=1, run_id="run-a", gateway=True) as pool:
    print(pool.log_dir.parent, pool.replicas[0].ram_dir.parent, flush=True)
    if sys.argv[3] == "raise":
        raise RuntimeError("on purpose")
    time.sleep(300)
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT", "raise"])
def test_nothing_outlives_the_owner(model: Path, tmp_path: Path, how: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(model), (tmp_path / "s").as_uri(), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    directories = [Path(part) for part in owner.stdout.readline().split()]
    assert len(directories) == 2, owner.communicate()[1]
    processes = psutil.Process(owner.pid).children(recursive=True) if how != "raise" else []
    if how != "raise":
        assert len(processes) >= 4  # warden, sidecar, engine, gateway
        owner.send_signal(getattr(signal, how))
    _, errors = owner.communicate(timeout=60)
    assert owner.returncode != 0
    if how == "raise":
        assert "on purpose" in errors
    until(lambda: gone(processes), 20)
    until(lambda: not any(path.exists() for path in directories), 20)


def test_an_older_pools_log_does_not_tell_where_this_one_listens(
    model: Path, tmp_path: Path, clean: None
) -> None:
    """Logs are appended to: the first address in a kept log was taken, whoever has it now."""
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "gateway.log").write_text("listening http://127.0.0.1:1\n")
    with LocalPool(
        model, store=tmp_path / "store", replicas=1, run_id=RUN, log_dir=logs, ready_s=60
    ) as pool:
        assert pool.url != "http://127.0.0.1:1"
    assert (logs / "gateway.log").read_text().count("listening") == 2


def test_too_few_ready_says_how_many_and_why(tmp_path: Path, clean: None) -> None:
    (tmp_path / "model").mkdir()
    pool = LocalPool(tmp_path / "model", store=tmp_path / "store", replicas=2, run_id=RUN)
    with pytest.raises(Unavailable, match=r"0 of 2 replicas are ready.*(?s:.*)checkpoint"):
        pool.start()
    assert not [p for p in family(pool) if "stitch.cli" in " ".join(p.cmdline())]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "{tmp}/absent"], "not a directory"),
        (["--model", "{tmp}/empty"], "checkpoint"),
        (["--model", "{model}", "--work-dir", "{tmp}/file/work"], "--work-dir"),
        (["--model", "{model}", "--port", "{taken}"], "--port"),
        (["--model", "{model}", "--port", "99999"], "port 99999"),
        (["--model", "{model}", "--replica-id", "a\r\nX: b"], "replica id"),
        (["--model", "{model}", "--store", "ftp://x"], "store"),
        (["--model", "{model}", "--store", "{tmp}/file"], "a file is in the way"),
        (["--model", "{model}", "--store", "/proc/store"], "the store at /proc/store"),
    ],
    ids=[
        "no model",
        "no checkpoint",
        "work dir",
        "port",
        "no port",
        "replica id",
        "store scheme",
        "store is a file",
        "store is not writable",
    ],
)
def test_a_replica_that_cannot_start_says_why_in_a_line(
    model: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    import socket

    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        facts = {"tmp": tmp_path, "model": model, "taken": taken.getsockname()[1]}
        given = [part.format(**facts) for part in arguments]
        if "--store" not in given:
            given += ["--store", (tmp_path / "store").as_uri()]
        done = subprocess.run(
            [sys.executable, "-m", "stitch.cli", "replica", "serve", *given],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
