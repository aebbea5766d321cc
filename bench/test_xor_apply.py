"""Apply and verify of interop deltas, one thread, against the plain algorithm in numpy.

Both sides read the same blob and base, produce the target and its xxh3-128. The opponent is what
today's receivers do: python-zstandard, `numpy.bitwise_xor`, `xxhash`. Rounds are interleaved, and
the ratio is of medians. Sizes, machine and spread go into `extra_info`.

Run: pytest bench/test_xor_apply.py --benchmark-json=out.json
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard

from stitch import _core

TENSOR_BYTES = 64 << 20
CHANGED_FRACTION = 0.01
ROUNDS = 9
WARMUP_ROUNDS = 2

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Case:
    """A BF16-like tensor before and after a step: 1 % of elements move by one or two ulps."""

    base: Bytes
    target: Bytes
    xor_blob: bytes
    overwrite_blob: bytes
    digest: str


@pytest.fixture(scope="module")
def case() -> Case:
    rng = np.random.default_rng(20261201)
    weights = (rng.standard_normal(TENSOR_BYTES // 2, dtype=np.float32) * 0.02).view(np.uint32)
    base = (weights >> 16).astype(np.uint16)
    target = base.copy()
    where = rng.choice(base.size, int(base.size * CHANGED_FRACTION), replace=False)
    ulps = rng.choice(np.array([1, -1, 2, -2]), where.size, p=[0.45, 0.45, 0.05, 0.05])
    target[where] += ulps.astype(np.int16).view(np.uint16)
    before, after = base.view(np.uint8), target.view(np.uint8)
    xor_blob = _core.xor_encode(before, after)  # type: ignore[arg-type]
    overwrite_blob = _core.overwrite_encode(before, after)  # type: ignore[arg-type]
    assert xor_blob is not None
    assert overwrite_blob is not None
    digest = xxhash.xxh3_128_hexdigest(after.tobytes())
    return Case(before, after, xor_blob, overwrite_blob, digest)


@pytest.fixture(autouse=True)
def default_variant() -> Iterator[None]:
    before = _core.isa()
    yield
    _core.set_isa(before)


def numpy_xor(case: Case, out: Bytes) -> str:
    delta = np.frombuffer(zstandard.ZstdDecompressor().decompress(case.xor_blob), dtype=np.uint8)
    np.bitwise_xor(case.base, delta, out=out)
    return xxhash.xxh3_128_hexdigest(out)


def numpy_overwrite(case: Case, out: Bytes) -> str:
    payload = zstandard.ZstdDecompressor().decompress(case.overwrite_blob)
    count = int.from_bytes(payload[:4], "little")
    positions = np.frombuffer(payload, dtype="<u4", count=count, offset=4)
    values = np.frombuffer(payload, dtype=np.uint8, count=count, offset=4 + 4 * count)
    np.copyto(out, case.base)
    out[positions] = values
    return xxhash.xxh3_128_hexdigest(out)


def native_xor(case: Case, out: Bytes) -> str | None:
    return _core.xor_apply(case.xor_blob, case.base, out, "xxh3-128", 0)[0]  # type: ignore[arg-type]


def native_overwrite(case: Case, out: Bytes) -> str | None:
    return _core.overwrite_apply(case.overwrite_blob, case.base, out, "xxh3-128", 0)[0]  # type: ignore[arg-type]


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def interleaved_seconds(*works: Callable[[], object]) -> list[list[float]]:
    """Seconds per round of each work; one round runs every work once, so drift hits all alike."""
    seconds: list[list[float]] = [[] for _ in works]
    for round_index in range(WARMUP_ROUNDS + ROUNDS):
        for index, work in enumerate(works):
            start = time.perf_counter()
            work()
            if round_index >= WARMUP_ROUNDS:
                seconds[index].append(time.perf_counter() - start)
    return seconds


def summary(name: str, seconds: list[float], nbytes: int = TENSOR_BYTES) -> str:
    median = statistics.median(seconds)
    spread = (max(seconds) - min(seconds)) / median
    return (
        f"{name}: {nbytes / median / 1e9:.2f} GB/s (median of {len(seconds)}, spread {spread:.0%})"
    )


@pytest.mark.parametrize(
    ("name", "native", "reference", "ratio_min"),
    [
        ("xor", native_xor, numpy_xor, 1.3),
        ("overwrite", native_overwrite, numpy_overwrite, 1.0),
    ],
)
def test_apply_and_verify(
    benchmark: Any,
    capsys: pytest.CaptureFixture[str],
    case: Case,
    name: str,
    native: Callable[[Case, Bytes], str | None],
    reference: Callable[[Case, Bytes], str],
    ratio_min: float,
) -> None:
    ours, theirs = np.empty_like(case.base), np.empty_like(case.base)
    assert native(case, ours) == case.digest
    assert reference(case, theirs) == case.digest
    assert np.array_equal(ours, case.target)
    assert np.array_equal(theirs, case.target)

    def touch() -> int:
        return int(case.base.view(np.uint64).sum(dtype=np.uint64))

    native_s, reference_s, read_s = interleaved_seconds(
        lambda: native(case, ours), lambda: reference(case, theirs), touch
    )
    ratio = statistics.median(reference_s) / statistics.median(native_s)
    benchmark.extra_info.update(
        cpu=cpu_name(),
        isa=_core.isa(),
        tensor_bytes=TENSOR_BYTES,
        changed_fraction=CHANGED_FRACTION,
        native_gb_per_s=TENSOR_BYTES / statistics.median(native_s) / 1e9,
        reference_gb_per_s=TENSOR_BYTES / statistics.median(reference_s) / 1e9,
        memory_read_gb_per_s=TENSOR_BYTES / statistics.median(read_s) / 1e9,
        ratio=ratio,
    )
    with capsys.disabled():
        print(f"\n{name} apply + verify on {cpu_name()}, {_core.isa()}, ratio {ratio:.2f}")
        print("  " + summary("native   ", native_s))
        print("  " + summary("reference", reference_s))
        print("  " + summary("memory read", read_s))
    benchmark.pedantic(lambda: native(case, ours), rounds=3, iterations=1)
    assert ratio >= ratio_min


@pytest.mark.parametrize("isa", _core.isa_available())
def test_additive_against_memory_read(
    benchmark: Any, capsys: pytest.CaptureFixture[str], isa: str
) -> None:
    """Full checksum by lane width against a sum over the same bytes, one thread. No bound."""
    _core.set_isa(isa)
    nbytes = 256 << 20
    data = np.random.default_rng(1).integers(0, 2**64, nbytes // 8, dtype=np.uint64)
    view = data.view(np.uint8)
    lanes = (8, 4, 2, 1) if isa != "scalar" else (8,)
    read_s, *lane_s = interleaved_seconds(
        lambda: data.sum(),
        *(lambda lane=lane: _core.additive(view, lane) for lane in lanes),  # type: ignore[misc]
    )
    read = statistics.median(read_s)
    ratios = {str(lane): read / statistics.median(s) for lane, s in zip(lanes, lane_s, strict=True)}
    benchmark.extra_info.update(
        cpu=cpu_name(), isa=isa, memory_read_gb_per_s=nbytes / read / 1e9, ratio_by_lane=ratios
    )
    with capsys.disabled():
        print(f"\nadditive checksum, {isa}, against memory read")
        print("  " + summary("memory read", read_s, nbytes))
        for lane, seconds in zip(lanes, lane_s, strict=True):
            print(
                "  " + summary(f"{lane}-byte lanes", seconds, nbytes), f"x{ratios[str(lane)]:.2f}"
            )
    benchmark.pedantic(lambda: _core.additive(view, 8), rounds=3, iterations=1)  # type: ignore[arg-type]
