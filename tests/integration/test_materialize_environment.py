"""Usage, bad bases, full disks, crashes: exit 2, one line, and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from publication_forge import INDEX, File, edit_index, snapshot, tensors_of

from stitch.cli import main
from stitch.env import Buffer, Env, FileHandle, OsFiles
from stitch.errors import Unavailable
from stitch.format.atomic_directory import remove_left_overs
from stitch.format.checkpoint import Checkpoint
from stitch.format.checkpoint_writer import CheckpointWriter
from stitch.format.materialize import materialize

SLIME = Path(__file__).resolve().parents[1] / "data" / "slime"
UPDATES = SLIME / "streams" / "xor-xxh3-128"


def arguments(free: Path, /, **changes: object) -> list[str]:
    options: dict[str, object] = {
        "base": SLIME / "base",
        "updates": UPDATES,
        "version": 4,
        "out": free,
    }
    found = ["materialize"]
    for key, value in (options | changes).items():
        if value is not None:
            found += [f"--{key.replace('_', '-')}", str(value)]
    return found


def run(free: Path, /, **changes: object) -> int:
    try:
        return main(arguments(free, **changes))
    except SystemExit as error:
        return int(str(error.code))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "four"},
        {"version": "-1"},
        {"version": "1.5"},
        {"version": str(2**53)},
        {"version": None},
        {"base": None},
        {"out": None},
        {"base_version": "x"},
        {"base_version": 5},
        {"run_id": "../x"},
        {"threads": 0},
        {"unknown": 1},
        {"updates": SLIME / "expected.json"},
        {"base": SLIME / "expected.json"},
        {"base": SLIME / "nowhere"},
        {"base": SLIME},
    ],
    ids=str,
)
def test_usage(
    changes: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "out", **changes) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("stitch materialize: ")
    assert error.endswith("retry: no\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["directory", "file", "broken-link", "no-parent", "file-parent"])
def test_out_must_be_free(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    if kind == "directory":
        out.mkdir()
    elif kind == "file":
        out.write_text("x")
    elif kind == "broken-link":
        out.symlink_to(tmp_path / "nowhere")
    elif kind == "no-parent":
        out = tmp_path / "a" / "out"
    else:
        (tmp_path / "a").write_text("x")
        out = tmp_path / "a" / "out"
    before = snapshot(tmp_path)
    assert run(out) == 2
    assert capsys.readouterr().err.endswith("retry: no\n")
    assert snapshot(tmp_path) == before


def spoil_header(base: Path) -> None:
    path = base / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def spoil_dtype(base: Path) -> None:
    file = File(base / "model-00001-of-00002.safetensors")
    file.entry(file.names[0])["dtype"] = "F4_X"
    file.save()


def tensor_in_both(base: Path) -> None:
    first = File(base / "model-00001-of-00002.safetensors")
    second = File(base / "model-00002-of-00002.safetensors")
    name = first.names[0]
    second.add(name, first.entry(name)["dtype"], first.entry(name)["shape"], first.bytes_of(name))
    second.save()


BAD_BASES: dict[str, Callable[[Path], object]] = {
    "cut": spoil_header,
    "dtype": spoil_dtype,
    "tensor-in-both": tensor_in_both,
    "shard-gone": lambda base: (base / "model-00002-of-00002.safetensors").unlink(),
    "index-gone": lambda base: (base / INDEX).unlink(),
    "index-fifo": lambda base: [(base / INDEX).unlink(), os.mkfifo(base / INDEX)],
    "index-torn": lambda base: (base / INDEX).write_text("{"),
    "index-empty": lambda base: (base / INDEX).write_text('{"weight_map": {}}'),
    "index-escapes": lambda base: (base / INDEX).write_text(
        '{"weight_map": {"a": "../a.safetensors"}}'
    ),
    "empty": lambda base: [path.unlink() for path in base.iterdir()],
}


@pytest.mark.parametrize("spoil", BAD_BASES.values(), ids=BAD_BASES.keys())
def test_a_bad_base_is_not_the_publications_fault(
    spoil: Callable[[Path], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(SLIME / "base", base)
    spoil(base)
    before = snapshot(tmp_path)
    assert run(tmp_path / "out", base=base) == 2
    error = capsys.readouterr().err
    assert str(base) in error
    assert error.endswith("retry: no\n")
    assert snapshot(tmp_path) == before


def test_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments(tmp_path / "a"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["version"] == 4
    assert report["applied"] == [1, 2, 3, 4]
    assert report["seed_version"] is None
    assert report["tensors"] == 13
    assert main(arguments(tmp_path / "b")) == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1
    assert printed.err == ""
    assert main([*arguments(tmp_path / "c"), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def shell(script: str, out: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stitch.cli", *arguments(out)]
    return subprocess.run(
        ["/bin/sh", "-c", f"exec {shlex.join(command)} {script}"],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(closed: str, tmp_path: Path) -> None:
    assert shell(closed, tmp_path / "out", tmp_path).returncode == 0
    assert tensors_of(tmp_path / "out").keys() == tensors_of(SLIME / "base").keys()


def test_a_result_that_cannot_be_printed_is_not_the_publications_fault(tmp_path: Path) -> None:
    done = shell(">/dev/full", tmp_path / "out", tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("No space left on device; retry: no\n")
    assert tensors_of(tmp_path / "out").keys() == tensors_of(SLIME / "base").keys()


class FaultyFiles(OsFiles):
    """Counts steps that write; step `fail_at` fails as a full disk does. Logs what happened."""

    def __init__(self, fail_at: int = -1, act: Callable[[], None] | None = None) -> None:
        self.steps = 0
        self.log: list[tuple[str, str]] = []
        self._fail_at = fail_at
        self._act = act

    def step(self, what: str, path: Path) -> None:
        self.log.append((what, path.name))
        self.steps += 1
        if self.steps - 1 == self._fail_at:
            if self._act is not None:
                self._act()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def create(self, path: Path) -> FileHandle:
        self.step("create", path)
        return _FaultyHandle(self, path, super().create(path))

    def sync_directory(self, path: Path) -> None:
        self.step("sync_directory", path)
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self.step("rename", target)
        super().rename(source, target)

    def make_directory(self, path: Path) -> None:
        self.step("make_directory", path)
        super().make_directory(path)


class _FaultyHandle:
    def __init__(self, files: FaultyFiles, path: Path, inner: FileHandle) -> None:
        self._files, self._path, self._inner = files, path, inner

    def write(self, data: Buffer) -> None:
        self._files.step("write", self._path)
        self._inner.write(data)

    def sync(self) -> None:
        self._files.step("sync", self._path)
        self._inner.sync()

    def close(self) -> None:
        self._files.log.append(("close", self._path.name))
        self._inner.close()


def attempt(files: OsFiles, out: Path) -> None:
    materialize(
        base=SLIME / "base", updates=UPDATES, version=3, out=out, env=Env(files=files), threads=1
    )


def test_a_full_disk_at_every_step_leaves_nothing(tmp_path: Path) -> None:
    whole = FaultyFiles()
    attempt(whole, tmp_path / "whole")
    assert whole.steps > 20
    for step in range(whole.steps):
        parent = tmp_path / f"at{step}"
        parent.mkdir()
        with pytest.raises(Unavailable, match="No space left"):
            attempt(FaultyFiles(step), parent / "out")
        assert list(parent.iterdir()) == [], f"step {step}: {whole.log[step]}"


def test_everything_is_synced_before_it_gets_its_name(tmp_path: Path) -> None:
    files = FaultyFiles()
    attempt(files, tmp_path / "out")
    log = files.log
    renamed = log.index(("rename", "out"))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert len(names) == 4
    for name in names:
        ours = [at for at, (_, path) in enumerate(log) if path == name]
        assert [what for what, path in log if path == name][-2:] == ["sync", "close"]
        assert max(ours) < renamed
    directories = [at for at, (what, _) in enumerate(log) if what == "sync_directory"]
    assert directories == [renamed - 1, renamed + 1]
    assert log[renamed + 1][1] == tmp_path.name


CHILD = """
import os, resource, signal, sys
sys.path.append({support!r})
from test_materialize_environment import FaultyFiles, attempt
from pathlib import Path
{act}
attempt(FaultyFiles(int(sys.argv[1]), act), Path(sys.argv[2]))
"""


def child(act: str, step: int, out: Path) -> list[str]:
    code = CHILD.format(support=str(Path(__file__).parent), act=act)
    return [sys.executable, "-c", code, str(step), str(out)]


def test_kill_9_leaves_no_out_and_the_next_run_cleans_up(tmp_path: Path) -> None:
    whole = FaultyFiles()
    attempt(whole, tmp_path / "whole")
    kill = "act = lambda: os.kill(os.getpid(), signal.SIGKILL)"
    steps = [1, 5, whole.steps // 2, whole.steps - 4, whole.steps - 2]
    out = tmp_path / "crash" / "out"
    out.parent.mkdir()
    running = [
        subprocess.Popen(child(kill, step, out), stderr=subprocess.DEVNULL) for step in steps
    ]
    assert {process.wait(60) for process in running} == {-signal.SIGKILL}
    assert not out.exists()
    left = list(out.parent.iterdir())
    assert 1 <= len(left) <= len(steps)
    assert all(path.name.startswith(".stitch-tmp-out-") for path in left)
    # What belongs to another output, or only looks like ours, stays.
    other = out.parent / ".stitch-tmp-out-b-0123456789abcdef"
    other.mkdir()
    assert run(out) == 0
    assert sorted(path.name for path in out.parent.iterdir()) == [other.name, "out"]
    assert tensors_of(out).keys() == tensors_of(SLIME / "base").keys()


def test_what_a_live_process_writes_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    wait = "act = lambda: (print('here', flush=True), sys.stdin.readline())"
    process = subprocess.Popen(
        child(wait, 6, out),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        assert remove_left_overs(out, Env()) == []
        assert len(list(tmp_path.iterdir())) == 1
        assert run(out) == 0
        assert len(list(tmp_path.iterdir())) == 2
    finally:
        process.kill()
        process.communicate()
    assert len(remove_left_overs(out, Env())) == 1
    assert list(tmp_path.iterdir()) == [out]


def test_a_real_file_size_limit(tmp_path: Path) -> None:
    """The kernel itself refuses the write (EFBIG), as it does on a full disk."""
    code = (
        "import resource, sys; from stitch.cli import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); "
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.endswith("retry: no\n")
    assert "File too large" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


NO_MEMORY = """
import resource, sys
from pathlib import Path
from stitch.cli import main
from stitch.format.materialize import materialize

pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (256 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.exit(main(sys.argv[1:]))
"""


def test_a_tensor_that_finds_no_memory_is_not_the_publications_fault(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    size = 1 << 30
    header = f'{{"a":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}}}'.encode()
    with (tmp_path / "base" / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    options = arguments(tmp_path / "out", base=tmp_path / "base", version=0, threads=1)
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY, *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.endswith("retry: no\n")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_line_on_stderr_is_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(UPDATES, tmp_path / "updates")
    edit_index(
        tmp_path / "updates",
        1,
        lambda index: index["weight_map"].update({"n" * 10**6: min(index["weight_map"].values())}),
    )
    assert run(tmp_path / "out", updates=tmp_path / "updates", version=1) == 1
    error = capsys.readouterr().err
    assert error.endswith("retry: no\n")
    assert len(error) < 3000


def test_a_host_without_threads_is_not_the_publications_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert run(tmp_path / "out") == 2
    assert capsys.readouterr().err.endswith("retry: no\n")
    assert list(tmp_path.iterdir()) == []


def test_a_side_file_that_is_replaced_meanwhile(tmp_path: Path) -> None:
    """Only the user's own base can change so: the publication is not at fault."""
    shutil.copytree(SLIME / "base", tmp_path / "base")
    with Checkpoint.open(tmp_path / "base") as base:
        (tmp_path / "base" / "config.json").unlink()
        os.mkfifo(tmp_path / "base" / "config.json")
        writer = CheckpointWriter(OsFiles(), tmp_path, base)
        with pytest.raises(Unavailable, match="changed"):
            writer.copy(base.side_files[0])


BOMBS = """
import contextlib, io, resource, shutil, sys
sys.path.append({support!r})
import zstandard
from pathlib import Path
from publication_forge import edit_file, lying_frame, frame, overwrite, unframe
from publication_damage_builders import SCALE, XOR, OVERWRITE, MODE, as_overwrite, EMBED, blob
from stitch.cli import main

def zeros(size, known):
    c = zstandard.ZstdCompressor(level=1)
    o = c.compressobj(size=size if known else -1)
    parts = [o.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return b"".join(parts) + o.flush()

slime, root = Path(sys.argv[1]), Path(sys.argv[2])
giant, unknown = zeros(1 << 30, True), zeros(1 << 30, False)
cases = [
    (XOR, blob(SCALE, lambda b: giant)),
    (XOR, blob(SCALE, lambda b: unknown)),
    (XOR, blob(SCALE, lambda b: lying_frame(unframe(b), 2**40))),
    (XOR, blob(SCALE, lambda b: lying_frame(unframe(b), 2**64 - 2))),
    (XOR, blob(SCALE, lambda b: lying_frame(unframe(b), 0))),
    (OVERWRITE, blob(MODE, lambda b: unknown)),
    (OVERWRITE, blob(EMBED, lambda b: unknown)),
    (OVERWRITE, as_overwrite(EMBED, lambda p, v: overwrite(p, v, count=2**32 - 1))),
]
def go(stream, version, at):
    options = ["--base", str(slime / "base"), "--updates", str(at), "--out", str(root / "out")]
    with contextlib.redirect_stderr(io.StringIO()):
        return main(["materialize", *options, "--version", str(version), "--quiet"])
assert go(XOR, 4, slime / "streams" / XOR) == 0
shutil.rmtree(root / "out")
peaks = []
for number, (stream, mutate) in enumerate(cases):
    at = root / str(number)
    shutil.copytree(slime / "streams" / stream, at)
    mutate(at)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert go(stream, 1, at) == 1, number
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
print(max(peaks))
"""


def test_bombs_and_lying_sizes_cost_no_memory(tmp_path: Path, say: Callable[[str], None]) -> None:
    """B74: a gigabyte of zeros, claims up to 2**64, and the peak hardly moves."""
    code = BOMBS.format(support=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", code, str(SLIME), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak_kib = int(done.stdout)
    say(f"materialize: eight bombs raised peak memory by {peak_kib} KiB")
    assert peak_kib < 24 * 1024
