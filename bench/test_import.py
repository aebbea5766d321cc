"""How long `import stitch` takes in a fresh interpreter, and what the bare interpreter takes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from pytest_benchmark.fixture import BenchmarkFixture

ROUNDS = 9
LIMIT_S = 0.150


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def test_import_is_light(benchmark: BenchmarkFixture) -> None:
    bare, loaded = [], []
    for _ in range(ROUNDS):
        bare.append(seconds("pass"))
        loaded.append(seconds("import stitch"))
    added = statistics.median(loaded) - statistics.median(bare)
    benchmark.pedantic(seconds, args=("import stitch",), rounds=3)
    benchmark.extra_info.update(
        bare_s=statistics.median(bare), import_s=statistics.median(loaded), added_s=added
    )
    assert added < LIMIT_S
