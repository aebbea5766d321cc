"""Turns build/bench.json (and the demo's report.json, if there) into Markdown.

usage: python bench/report.py [OUT]     default OUT: build/bench.md
`make bench DOCS=1` writes docs/benchmarks.md with it.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "build" / "bench.json"
DEMO = ROOT / "build" / "demo" / "report.json"

Row = tuple[str, str, str, str, str]


def rows_of(name: str, info: dict[str, Any]) -> list[Row]:
    """(what, Stitch, baseline, ratio, target) of one benchmark."""
    if name.startswith("test_apply_and_verify"):
        encoding = name.split("[")[1].split("-")[0]
        return [
            (
                f"apply + verify `{encoding}`, 1 thread, 64 MiB of BF16, 1 % changed",
                f"{info['native_gb_per_s']:.1f} GB/s",
                f"{info['reference_gb_per_s']:.1f} GB/s numpy + python-zstandard + xxhash",
                f"{info['ratio']:.2f}×",
                "1.3×" if encoding == "xor" else "–",
            )
        ]
    if name.startswith("test_additive"):
        read = info["memory_read_gb_per_s"]
        return [
            (
                f"additive checksum, {info['isa']}, {lane}-byte lanes",
                f"{ratio * read:.1f} GB/s",
                f"{read:.1f} GB/s sum over the same bytes",
                f"{ratio:.2f}×",
                "–",
            )
            for lane, ratio in info["ratio_by_lane"].items()
        ]
    if name == "test_pass_through_per_cpu_second":
        return [
            (
                "sidecar pass-through, 64 connections",
                f"{info['sidecar']['per_cpu_s']:,.0f} requests per CPU-second",
                f"{info['aiohttp']['per_cpu_s']:,.0f} for an aiohttp reverse proxy",
                f"{info['ratio_sidecar_aiohttp']:.2f}×",
                "2×",
            )
        ]
    if name == "test_admission_adds_little":
        return [
            (
                "admission, added at p50, 2 connections",
                f"{info['admission_added_p50_ms']:+.3f} ms",
                f"{info['ungated']['p50_ms']:.3f} ms for the same proxy without a gate",
                "–",
                "< 0.3 ms",
            ),
            (
                "whole sidecar, added at p50",
                f"{info['sidecar_added_p50_ms']:+.3f} ms",
                f"{info['direct']['p50_ms']:.3f} ms straight to the upstream",
                "–",
                "–",
            ),
        ]
    assert name == "test_import_is_light", f"no row for {name}; add one here"
    return [
        (
            "`import stitch`, added to a bare interpreter",
            f"{info['added_s'] * 1000:.0f} ms",
            f"{info['bare_s'] * 1000:.0f} ms bare",
            "–",
            "< 150 ms",
        )
    ]


def demo_lines(report: dict[str, Any]) -> list[str]:
    """Figures of one `make demo`."""
    activations = report["activations"]

    def median_ms(key: str) -> str:
        found = [a[key] for a in activations if a.get(key) is not None]
        return f"{statistics.median(found) * 1000:.1f} ms" if found else "–"

    labels, bytes_of = report["labels"], report["publication_bytes"].values()
    return [
        "",
        "## The demo",
        "",
        "`make demo DEMO_ARGS='--json --out build/demo'`: three CPU engines, the trainer, the",
        "gateway and the sidecars share two cores.",
        "",
        "| figure | value |",
        "| --- | --- |",
        f"| activations | {len(activations)} |",
        f"| `swap_s`, median (target under 50 ms) | {median_ms('swap_s')} |",
        f"| `gate_closed_s`, median | {median_ms('gate_closed_s')} |",
        f"| `recompute_s`, median | {median_ms('recompute_s')} |",
        f"| bytes of a publication, median | {statistics.median(bytes_of) / 1e6:.2f} MB |",
        f"| spans that match their version | {labels['accepted']:,} of {labels['spans']:,} |",
        f"| neighbouring versions rejected | {labels['rejected_share']:.2%} |",
        f"| requests lost | {report['lost_requests']} of {report['requests']:,} |",
    ]


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "bench.md"
    data = json.loads(BENCH.read_text())
    cpu = data["machine_info"]["cpu"]
    lines = [
        "# Benchmarks",
        "",
        "Ratios against a named baseline, measured interleaved in one run; medians. Made by",
        "`make bench DOCS=1`; the raw figures are in `build/bench.json`.",
        "",
        f"Machine: {cpu.get('brand_raw', 'unknown')}, {cpu.get('count', '?')} cores, "
        f"Python {data['machine_info']['python_version']}, {data['datetime'][:10]}.",
        "",
        "| what | Stitch | baseline in the same run | ratio | target |",
        "| --- | --- | --- | --- | --- |",
    ]
    for found in data["benchmarks"]:
        lines += [f"| {' | '.join(row)} |" for row in rows_of(found["name"], found["extra_info"])]
    if DEMO.exists():
        lines += demo_lines(json.loads(DEMO.read_text()))
    text = "\n".join(lines) + "\n"
    out.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
