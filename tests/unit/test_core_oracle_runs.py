"""A variant may be chosen by default only while a passing oracle run of its sources is recorded.

`RECORD=1 tests/native/run.sh none` on a machine that runs the variant writes the record.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ("cpu/variants.hpp", "cpu/xxh3_variant.inc", "core/kernels.hpp")


def default_variants() -> list[str]:
    """The names of the tables that dispatch.cpp may choose."""
    dispatch = (ROOT / "csrc" / "cpu" / "dispatch.cpp").read_text(encoding="utf-8")
    block = dispatch[dispatch.index("kBuilt = {") : dispatch.index("};", dispatch.index("kBuilt"))]
    return [name.lower() for name in re.findall(r"&k(\w+)Kernels", block)]


def source_digest(variant: str) -> str:
    digest = hashlib.sha256()
    for name in (f"cpu/{variant}.cpp", *SHARED):
        digest.update((ROOT / "csrc" / name).read_bytes())
    return digest.hexdigest()


def test_every_default_variant_has_a_record_of_its_present_sources() -> None:
    variants = default_variants()
    assert variants[-1] == "scalar"
    records = {}
    text = (ROOT / "tests" / "native" / "oracle-runs.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        variant, digest, cpu, compiler = line.split(" | ")
        assert cpu
        assert compiler
        records[variant] = digest
    stale = [name for name in variants if records.get(name) != source_digest(name)]
    assert not stale, f"run RECORD=1 tests/native/run.sh none for: {', '.join(stale)}"
