"""The demo's HTML report: one self-contained page, readable without a network. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import median, quantiles
from typing import Final

from stitch.demo.checks import NO_NEIGHBOURS, Check
from stitch.demo.labels import LabelReport
from stitch.demo.record import RunRecord
from stitch.demo.settings import DemoSettings
from stitch.demo.svg import Lane, bar_chart, histogram, line_chart, timeline
from stitch.demo.view import byte_text

__all__ = ["html_report", "pause_rows", "summary_rows"]

_STYLE: Final = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#5b6675;--paper:#fff;--line:#d9dfe6;
--c0:#1f6feb;--c1:#d9730d;--c2:#2e9e6b}
@media(prefers-color-scheme:dark){:root{--ink:#e6ebf1;--soft:#9aa6b4;--paper:#12161c;
--line:#2c3540;--c0:#6ea8ff;--c1:#f0a860;--c2:#63d2a0}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:940px;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;margin:0}h2{font-size:1.1rem;margin:2.2rem 0 .4rem}
p{color:var(--soft);margin:.3rem 0 .6rem}table{border-collapse:collapse;width:100%}
td,th{padding:.3rem .6rem;border-bottom:1px solid var(--line);text-align:left;
vertical-align:top}
th{font-weight:600}.ok{color:#2e9e6b;font-weight:600}.bad{color:#d1382e;font-weight:600}
.warn{color:#c98500;font-weight:600}svg{width:100%;height:auto;display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--soft)}.grid{stroke:var(--line)}
.mark{stroke:#d1382e;stroke-dasharray:4 3}.line{fill:none;stroke-width:1.8}
.line.c0{stroke:var(--c0)}.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}
.bar.c0{fill:var(--c0)}.bar.c1{fill:var(--c1)}.bar.c2{fill:var(--c2)}
.key b{padding:0 .35rem}.k0{color:var(--c0)}.k1{color:var(--c1)}.k2{color:var(--c2)}
"""


def html_report(
    settings: DemoSettings, record: RunRecord, labels: LabelReport, checks: Sequence[Check]
) -> str:
    """The whole page."""
    passed = all(check.passed for check in checks if check.required)
    verdict = '<span class="ok">passed</span>' if passed else '<span class="bad">failed</span>'
    body = (
        f"<h1>Stitch demo: {verdict}</h1>"
        f"<p>{escape(_headline(settings, record))}</p>"
        + _checks_table(checks)
        + _run_sections(record)
        + _traffic_sections(record)
        + _section("Labels", _labels_text(labels), _table((), _label_rows(labels)))
        + _section("Events", "", _table((), [(f"{t:.1f} s", text) for t, text in record.notes]))
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Stitch demo</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>{body}</body></html>"
    )


def _run_sections(record: RunRecord) -> str:
    """What happened over time: reward, and which replica served what."""
    marks = [(at_s, text) for at_s, text in record.notes if "SIGKILL" in text or "joined" in text]
    end_s = max([step.at_s for step in record.steps] + [a.at_s for a in record.activations] + [1.0])
    return _section(
        "Reward",
        "Mean reward of each step's trajectories. Dashed: a replica was killed, one joined.",
        line_chart(
            [("reward", [(s.at_s, s.reward) for s in record.steps])],
            x_name="seconds",
            y_name="reward",
            y_max=1.0,
            marks=marks,
        ),
    ) + _section(
        "Replicas by version",
        "Each stretch is coloured by the version that the replica served; grey means that it "
        "served none. Hover for the number.",
        timeline(
            [Lane(t.id, t.joined_s, t.left_s, t.killed, t.points) for t in record.tracks.values()],
            end_s=end_s,
            version_max=max([s.version for s in record.steps] + [1]),
            marks=marks,
        ),
    )


def _traffic_sections(record: RunRecord) -> str:
    """What it cost: pauses, bytes, and the age of tokens."""
    pauses = histogram(
        [("gate closed", _ms(record, "gate_closed_s")), ("swap", _ms(record, "swap_s"))],
        x_name="milliseconds",
    )
    sizes = bar_chart(
        [
            (float(v), size / 1e6, 1 if record.kinds.get(v) == "anchor" else 0)
            for v, size in sorted(record.delta_bytes.items())
        ],
        x_name="version",
        y_name="MB",
        label="bytes per version",
    )
    ages = bar_chart(
        [
            (float(age), float(record.staleness.counts.get(age, 0)), 0)
            for age in range(max(record.staleness.counts, default=-1) + 1)
        ],
        x_name="versions",
        y_name="tokens",
        label="tokens by staleness",
    )
    return (
        _section(
            "Pauses",
            '<span class="key"><b class="k0">gate closed</b><b class="k1">swap</b></span> '
            "per activation. The swap is the part in which weights are written.",
            pauses + _table(("", "median", "p95", "max", "count"), pause_rows(record)),
        )
        + _section("Publications", f"Bytes per version. {escape(_kinds(record))}", sizes)
        + _section(
            "Staleness",
            "Age of tokens when the trainer consumed them, in versions.",
            ages,
        )
    )


def summary_rows(record: RunRecord) -> list[tuple[str, str]]:
    """The figures of the terminal summary."""
    refused = record.counters.get("stitch_gateway_refusals_total", 0)
    sizes = sorted(record.delta_bytes.values())
    pauses = [f"{row[0]} {row[1]}" for row in pause_rows(record)]
    retries = sum(record.client_retries.values())
    return [
        ("versions published", str(len(record.delta_bytes))),
        ("bytes a publication", f"{byte_text(median(sizes))} (median)" if sizes else "-"),
        ("activations", f"{len(record.activations)}; medians: {', '.join(pauses) or 'none'}"),
        ("requests", f"{record.requests}, {record.lost_requests} lost, {retries} retried"),
        ("tries refused by replicas", f"{refused} (409, 429, 503)"),
        (
            "staleness of tokens",
            f"{record.staleness.mean:.2f} versions on average, {record.staleness.max} at most",
        ),
    ]


def pause_rows(record: RunRecord) -> list[tuple[str, ...]]:
    """Median, 95th percentile, maximum and count of each kind of pause."""
    rows = []
    for name, key in (
        ("gate closed", "gate_closed_s"), ("swap", "swap_s"), ("recompute", "recompute_s"),
    ):  # fmt: skip
        values = _ms(record, key)
        if values:
            high = quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
            rows.append((name, *(f"{v:.1f} ms" for v in (median(values), high, max(values))),
                         str(len(values))))  # fmt: skip
    return rows


def _ms(record: RunRecord, key: str) -> list[float]:
    values = [getattr(activation, key) for activation in record.activations]
    return [value * 1e3 for value in values if value is not None]


def _headline(settings: DemoSettings, record: RunRecord) -> str:
    end = record.steps[-1].at_s if record.steps else 0.0
    tokens = sum(record.staleness.counts.values())
    return (
        f"{len(record.steps)} steps of asynchronous policy gradient in {end:.0f} seconds with "
        f"{settings.replicas} replicas; {len(record.trajectories)} trajectories, {tokens} tokens, "
        f"each labelled with the version that made it. Requests asked for a version at most "
        f"{settings.lag_max} behind; activation mode {settings.mode}; seed {settings.seed}; "
        f"learning rate {settings.lr:g}."
    )


def _checks_table(checks: Sequence[Check]) -> str:
    rows = []
    for check in checks:
        if check.passed:
            mark = '<span class="ok">ok</span>'
        elif check.required:
            mark = '<span class="bad">FAILED</span>'
        else:
            mark = '<span class="warn">missed</span>'
        rows.append(
            f"<tr><td>{mark}</td><th>{escape(check.name)}</th><td>{escape(check.detail)}</td></tr>"
        )
    return f"<h2>Checks</h2><table>{''.join(rows)}</table>"


def _labels_text(labels: LabelReport) -> str:
    return escape(
        "Log-probabilities of every trajectory, recomputed from the store's bytes under the "
        "version of each span and under the versions before and after. "
        + (f"Worst: {labels.worst}." if labels.worst else "")
    )


def _label_rows(labels: LabelReport) -> list[tuple[str, str]]:
    return [
        ("trajectories", f"{labels.trajectories}, {labels.multi_span} over several versions"),
        ("tokens", str(labels.tokens)),
        ("versions materialized", str(labels.versions)),
        ("spans accepted", f"{labels.accepted} of {labels.spans}"),
        ("spans with carried state, not judged", str(labels.carried)),
        ("greatest error", f"{labels.error_max:.2e} nats; accepted up to {labels.tolerance:g}"),
        ("neighbouring versions rejected", _rejected(labels)),
    ]


def _rejected(labels: LabelReport) -> str:
    if not labels.neighbours:
        return NO_NEIGHBOURS
    return (
        f"{labels.rejected} of {labels.neighbours} ({labels.rejected_share:.2%}); the error there "
        f"is {labels.neighbour_error_median:.2e} nats at the median, above "
        f"{labels.neighbour_error_low:.2e} in 99 %"
    )


def _kinds(record: RunRecord) -> str:
    anchors = sum(kind == "anchor" for kind in record.kinds.values())
    return f"{len(record.kinds) - anchors} deltas, {anchors} anchors."


def _section(title: str, text: str, inner: str) -> str:
    return f"<h2>{escape(title)}</h2><p>{text}</p>{inner}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table>{f'<tr>{top}</tr>' if top else ''}{lines}</table>"
