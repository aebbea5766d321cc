"""The binding layer: buffers, error classes, instruction-set choice, and the released GIL."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import stitch
from stitch import _core
from stitch.errors import CorruptData, InvalidInput


def test_variants_covered(say: Callable[[str], None]) -> None:
    """Says which variants this machine's run covers."""
    available = _core.isa_available()
    say(f"native core: variants {', '.join(available)}; default {_core.isa()}")
    assert available[-1] == "scalar"
    assert _core.isa() in available


def test_the_stub_lists_exactly_what_the_module_has() -> None:
    stub = Path(stitch.__file__).with_name("_core.pyi")
    names = set()
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    public = {name for name in dir(_core) if not name.startswith("_")}
    assert public == names


def run_python(code: str, isa: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "STITCH_ISA": isa}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("isa", _core.isa_available())
def test_environment_forces_the_variant_that_runs(isa: str) -> None:
    done = run_python("from stitch import _core; print(_core.isa())", isa)
    assert done.stdout.strip() == isa, done.stderr


@pytest.mark.parametrize("isa", ["AVX2", "sse9", "scalar "])
def test_an_unknown_variant_is_an_error_not_a_fallback(isa: str) -> None:
    done = run_python("from stitch import _core; _core.additive(b'12345678', 8)", isa)
    assert done.returncode != 0
    assert "InvalidInput: STITCH_ISA: unknown instruction set" in done.stderr
    with pytest.raises(InvalidInput, match="unknown instruction set"):
        _core.set_isa(isa)


def test_any_contiguous_buffer_is_taken_as_bytes() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    raw = values.tobytes()
    expected = _core.xxh3_128(raw)
    for buffer in (raw, bytearray(raw), memoryview(raw), memoryview(values), values):
        assert _core.xxh3_128(buffer) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "buffer",
    [
        memoryview(b"abcdef")[::2],
        np.zeros((4, 4), dtype=np.uint8).T[1:],
        np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(3, 4)),
        "text",
        None,
        7,
    ],
    ids=["strided", "sliced transpose", "fortran", "str", "None", "int"],
)
def test_what_is_no_contiguous_buffer_is_a_type_error(buffer: object) -> None:
    with pytest.raises(TypeError, match="C-contiguous buffer"):
        _core.xxh3_128(buffer)  # type: ignore[arg-type]


def test_a_read_only_target_is_a_type_error() -> None:
    blob = _core.xor_encode(b"abcd", b"abce")
    assert blob is not None
    with pytest.raises(TypeError, match="out must be a writable"):
        _core.xor_apply(blob, b"abcd", b"1234", "none", 0)
    with pytest.raises(TypeError, match="out must be a writable"):
        _core.copy_digest(b"abcd", memoryview(b"1234"), "none", 0)


def test_errors_are_the_classes_of_stitch_errors() -> None:
    with pytest.raises(CorruptData) as corrupt:
        _core.zstd_decompress(b"no frame", 10)
    assert corrupt.value.code == "CorruptData"
    assert corrupt.value.message == str(corrupt.value)
    assert "frame" in corrupt.value.message
    with pytest.raises(InvalidInput):
        _core.additive(b"abc", 2)


def test_the_export_is_held_and_released() -> None:
    held = bytearray(16)
    _core.xxh3_128(held)
    with pytest.raises(CorruptData):
        _core.xor_apply(b"junk", held, held, "none", 0)
    held.append(1)  # a leaked export would make this a BufferError


def test_the_gil_is_released_while_bytes_are_read() -> None:
    """Python code sees the buffer exported, so it runs while the native call does."""
    data = bytearray(48 << 20)
    before = _core.isa()
    _core.set_isa("scalar")
    worker = threading.Thread(target=lambda: _core.additive(data, 1))
    seen_inside = 0
    try:
        worker.start()
        while worker.is_alive():
            try:
                data.append(0)
            except BufferError:  # only an export forbids this, and only a call holds one
                seen_inside += 1
            else:
                data.pop()
        worker.join()
    finally:
        _core.set_isa(before)
    assert seen_inside > 0


def test_a_hasher_is_safe_between_threads() -> None:
    """Concurrent updates of one hasher raise or serialise; they never corrupt its state."""
    hasher = _core.Hasher("xxh3-128")
    piece = bytes(1 << 20)
    done = []

    def work() -> None:
        for _ in range(20):
            try:
                hasher.update(piece)
            except InvalidInput:
                continue
            done.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hasher.hexdigest() == _core.xxh3_128(piece * len(done))


def test_signatures_carry_the_documented_names() -> None:
    """Keyword calls as the stub spells them."""
    assert _core.additive(data=b"1234", lane_bytes=4, first_lane=0, threads=1) is not None
    assert _core.zstd_decompress(blob=_core.zstd_compress(data=b"x", level=1), size_max=1) == b"x"
    assert _core.copy_digest(source=b"x", out=None, digest="none", lane_bytes=0) == (None, None)
    assert inspect.isbuiltin(_core.xor_apply)


NO_MEMORY = """
import resource
from pathlib import Path
import zstandard
from stitch import _core

wide = zstandard.ZstdCompressionParameters.from_level(1, window_log=27, write_content_size=False)
stream = zstandard.ZstdCompressor(compression_params=wide).compressobj()
data = bytes(1 << 20)
blob = stream.compress(data) + stream.flush()
out = bytearray(data)
_core.xor_apply(blob, data, out, "adler32", 0)
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (32 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    _core.xor_apply(blob, data, out, "adler32", 0)
except MemoryError as error:
    print(error)
"""


def test_a_window_that_finds_no_memory_is_not_corrupt_data() -> None:
    """A frame may ask for a window of 128 MiB; that a host lacks it says nothing of the bytes."""
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, timeout=60, check=False
    )
    assert "no memory for a zstd decoder" in done.stdout, done.stderr


WRITTEN_MEANWHILE = """
import threading
from stitch import _core
from stitch.errors import InvalidInput

base, target = bytes(1 << 20), bytearray(1 << 20)
noise = (bytes(1 << 16), bytes([1]) * (1 << 16))
done = threading.Event()

def write():
    turn = 0
    while not done.is_set():
        at = turn * (1 << 16) % len(target)
        target[at : at + (1 << 16)] = noise[turn // 16 % 2]
        turn += 1

writer = threading.Thread(target=write)
writer.start()
noticed = 0
for _ in range(200):
    try:
        _core.overwrite_encode(base, target)
    except InvalidInput:
        noticed += 1
done.set()
writer.join()
print("noticed", noticed)
"""


def test_inputs_that_are_written_to_meanwhile_cannot_overrun_the_payload() -> None:
    """The changes are counted, then collected: more of them may have appeared in between."""
    done = subprocess.run(
        [sys.executable, "-c", WRITTEN_MEANWHILE],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "noticed" in done.stdout
