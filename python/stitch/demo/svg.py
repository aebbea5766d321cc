"""The report's charts as inline SVG: lines, bars, a histogram, the replica timeline. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Lane", "bar_chart", "histogram", "line_chart", "timeline"]

_WIDTH, _HEIGHT = 880, 252
# The y axis' name has the top line to itself.
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 26, 34


@dataclass(frozen=True, slots=True)
class Lane:
    """One replica in the timeline: `points` are (seconds, state, version or None), by time."""

    name: str
    begin_s: float
    end_s: float | None
    killed: bool
    points: Sequence[tuple[float, str, int | None]]


class _Axes:
    """Maps data to the plot area and draws its frame. whole: mark only integers on the x axis."""

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        x_name: str,
        y_name: str,
        whole: bool = False,
    ) -> None:
        self.x0, self.x1 = x[0], max(x[1], x[0] + 1e-9)
        self.y0, self.y1 = y[0], max(y[1], y[0] + 1e-9)
        self.names = (x_name, y_name)
        self.whole = whole

    def at_x(self, value: float) -> float:
        return _LEFT + (value - self.x0) / (self.x1 - self.x0) * (_WIDTH - _LEFT - _RIGHT)

    def at_y(self, value: float) -> float:
        return (
            _HEIGHT - _BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (_HEIGHT - _TOP - _BOTTOM)
        )

    def frame(self) -> str:
        parts = []
        for value in _ticks(self.y0, self.y1):
            y = self.at_y(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" '
                         f'y2="{y:.1f}"/>')  # fmt: skip
            parts.append(_text(_LEFT - 6, y + 4, f"{value:g}", "end"))
        for value in _ticks(self.x0, self.x1):
            if self.whole and value % 1:
                continue
            parts.append(_text(self.at_x(value), _HEIGHT - _BOTTOM + 16, f"{value:g}", "middle"))
        parts.append(_text(_WIDTH - _RIGHT, _HEIGHT - 3, self.names[0], "end"))
        parts.append(_text(4, 11, self.names[1], "start"))
        return "".join(parts)


def line_chart(
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    *,
    x_name: str,
    y_name: str,
    y_max: float | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Lines over a shared x axis, with vertical marks at moments worth noting."""
    points = [point for _, line in series for point in line]
    if not points:
        return _empty()
    top = y_max if y_max is not None else max(y for _, y in points) * 1.05
    xs = [x for x, _ in points] + [x for x, _ in marks]
    axes = _Axes((min(xs), max(xs)), (0.0, top), x_name=x_name, y_name=y_name)
    parts = [axes.frame(), _marks(axes, marks)]
    for number, (name, line) in enumerate(series):
        path = " ".join(f"{axes.at_x(x):.1f},{axes.at_y(min(y, top)):.1f}" for x, y in line)
        parts.append(
            f'<polyline class="line c{number}" points="{path}"><title>{escape(name)}</title>'
            "</polyline>"
        )
    return _svg("".join(parts), _HEIGHT, ", ".join(name for name, _ in series))


def bar_chart(
    bars: Sequence[tuple[float, float, int]], *, x_name: str, y_name: str, label: str
) -> str:
    """Bars at (x, height, colour number); each x is an integer."""
    if not bars:
        return _empty()
    xs = [x for x, _, _ in bars]
    axes = _Axes(
        (min(xs) - 0.5, max(xs) + 0.5), (0.0, max(h for _, h, _ in bars) * 1.05),
        x_name=x_name, y_name=y_name, whole=True,
    )  # fmt: skip
    width = max(1.0, (axes.at_x(1) - axes.at_x(0)) * 0.8)
    parts = [axes.frame()]
    for x, height, colour in bars:
        y = axes.at_y(height)
        parts.append(
            f'<rect class="bar c{colour}" x="{axes.at_x(x) - width / 2:.1f}" y="{y:.1f}" '
            f'width="{width:.1f}" height="{axes.at_y(0) - y:.1f}"><title>{x:g}: {height:g}</title>'
            "</rect>"
        )
    return _svg("".join(parts), _HEIGHT, label)


def histogram(series: Sequence[tuple[str, Sequence[float]]], *, x_name: str, bins: int = 30) -> str:
    """Counts per bin, one colour a series, side by side; the top percent falls in the last bin."""
    every = sorted(value for _, values in series for value in values)
    if not every:
        return _empty()
    top = every[min(len(every) - 1, int(0.99 * len(every)))] or 1e-9
    counts = []
    for _, values in series:
        row = [0] * bins
        for value in values:
            row[min(bins - 1, int(value / top * bins))] += 1
        counts.append(row)
    axes = _Axes(
        (0.0, top), (0.0, float(max(max(row) for row in counts)) * 1.05),
        x_name=x_name, y_name="activations",
    )  # fmt: skip
    slot = (axes.at_x(top) - axes.at_x(0)) / bins
    width = slot * 0.9 / len(series)
    parts = [axes.frame()]
    for number, row in enumerate(counts):
        for index, count in enumerate(row):
            if count:
                x, y = axes.at_x(0) + index * slot + number * width, axes.at_y(count)
                parts.append(
                    f'<rect class="bar c{number}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                    f'height="{axes.at_y(0) - y:.1f}"><title>{count}</title></rect>'
                )
    return _svg("".join(parts), _HEIGHT, ", ".join(name for name, _ in series))


def timeline(
    lanes: Sequence[Lane], *, end_s: float, version_max: int, marks: Sequence[tuple[float, str]]
) -> str:
    """Replicas by time: each stretch coloured by the version served, grey while there is none."""
    if not lanes:
        return _empty()
    row, gap = 26, 10
    height = _TOP + len(lanes) * (row + gap) + _BOTTOM
    axes = _Axes((0.0, end_s), (0.0, 1.0), x_name="seconds", y_name="")
    parts = []
    for number, lane in enumerate(lanes):
        y = _TOP + number * (row + gap)
        stop = lane.end_s if lane.end_s is not None else end_s
        parts.append(_text(2, y + row / 2 + 4, lane.name, "start"))
        for begin, state, version, end in _stretches(lane, stop):
            x, right = axes.at_x(begin), axes.at_x(end)
            fill = "#9995" if version is None else _hue(version, version_max)
            words = f"{state}, version {'unknown' if version is None else version}"
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{max(0.3, right - x):.2f}" height="{row}" '
                f'fill="{fill}"><title>{escape(f"{lane.name}: {words}")}</title></rect>'
            )
        if lane.killed:
            parts.append(_text(axes.at_x(stop) + 4, y + row / 2 + 5, "✕ SIGKILL", "start"))
    base = height - _BOTTOM
    for value in _ticks(0.0, end_s):
        parts.append(_text(axes.at_x(value), base + 16, f"{value:g} s", "middle"))
    for at_s, words in marks:
        x = axes.at_x(at_s)
        parts.append(
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{base}">'
            f"<title>{escape(words)}</title></line>"
        )
    return _svg("".join(parts), height, "replicas by version served")


def _stretches(lane: Lane, stop: float) -> list[tuple[float, str, int | None, float]]:
    found: list[tuple[float, str, int | None, float]] = []
    at, state, version = lane.begin_s, "BOOTING", None
    for when, now_state, now_version in lane.points:
        if (now_state, now_version) != (state, version):
            if when > at:
                found.append((at, state, version, min(when, stop)))
            at, state, version = when, now_state, now_version
    if stop > at:
        found.append((at, state, version, stop))
    return found


def _hue(version: int, version_max: int) -> str:
    share = version / max(1, version_max)
    # Neighbouring versions alternate in lightness, so that each swap is visible.
    return f"hsl({210 - 170 * share:.0f} 62% {52 if version % 2 else 60}%)"


def _ticks(low: float, high: float, count: int = 6) -> list[float]:
    span = high - low
    if span <= 0:
        return [low]
    step = 10.0 ** math.floor(math.log10(span / count))
    step = next((step * m for m in (1, 2, 5, 10) if span / (step * m) <= count), step * 10)
    first = math.ceil(low / step)
    return [round(n * step, 10) for n in range(first, math.floor(high / step) + 1)]


def _marks(axes: _Axes, marks: Sequence[tuple[float, str]]) -> str:
    return "".join(
        f'<line class="mark" x1="{axes.at_x(x):.1f}" x2="{axes.at_x(x):.1f}" y1="{_TOP}" '
        f'y2="{_HEIGHT - _BOTTOM}"><title>{escape(words)}</title></line>'
        for x, words in marks
    )


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(inner: str, height: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{escape(label)}">{inner}'
        "</svg>"
    )


def _empty() -> str:
    return _svg(_text(_WIDTH / 2, _HEIGHT / 2, "nothing was recorded", "middle"), _HEIGHT, "empty")
