"""Metrics in Prometheus text form. Small on purpose: counters, gauges, histograms, labels.

Recording never raises for a wrong value and never fails a request: a series that would pass
`SERIES_MAX` is dropped and counted in `stitch_metrics_dropped_total`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["LATENCY_S", "Metrics"]

SERIES_MAX: Final = 2000
LATENCY_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)

_Labels = tuple[tuple[str, str], ...]


class _Histogram:
    __slots__ = ("buckets", "count", "total")

    def __init__(self, size: int) -> None:
        self.buckets = [0] * size
        self.count = 0
        self.total = 0.0


class Metrics:
    """One process's series. Used from one event loop; not thread-safe."""

    def __init__(self) -> None:
        self._help: dict[str, tuple[str, str]] = {}
        self._values: dict[str, dict[_Labels, float]] = {}
        self._histograms: dict[str, dict[_Labels, _Histogram]] = {}
        self._bounds: dict[str, Sequence[float]] = {}
        self._series = 0
        self._dropped = 0

    def counter(self, name: str, text: str) -> None:
        """Declare a counter (its name ends in `_total`) with its help text."""
        self._help[name] = ("counter", text)
        self._values.setdefault(name, {})

    def gauge(self, name: str, text: str) -> None:
        """Declare a gauge with its help text."""
        self._help[name] = ("gauge", text)
        self._values.setdefault(name, {})

    def histogram(self, name: str, text: str, bounds: Sequence[float] = LATENCY_S) -> None:
        """Declare a histogram with its help text and upper bucket bounds, ascending."""
        self._help[name] = ("histogram", text)
        self._histograms.setdefault(name, {})
        self._bounds[name] = tuple(bounds)

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Increase a counter."""
        series = self._values.get(name)
        key = _key(labels)
        if series is None or not self._room(key in series):
            return
        series[key] = series.get(key, 0.0) + amount

    def set(self, name: str, value: float | None, **labels: str) -> None:
        """Set a gauge; None removes the series (nothing known is not zero)."""
        series = self._values.get(name)
        key = _key(labels)
        if series is None:
            self._dropped += 1
        elif value is None:
            if series.pop(key, None) is not None:
                self._series -= 1
        elif self._room(key in series):
            series[key] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Record one observation in a histogram. Values that are not finite are dropped."""
        series = self._histograms.get(name)
        key = _key(labels)
        if series is None or not math.isfinite(value) or not self._room(key in series):
            return
        bounds = self._bounds[name]
        found = series.get(key)
        if found is None:
            found = series[key] = _Histogram(len(bounds))
        found.count += 1
        found.total += value
        for index, bound in enumerate(bounds):
            if value <= bound:
                found.buckets[index] += 1
                break

    def text(self) -> str:
        """The exposition page, series in order of declaration, then of first use."""
        lines: list[str] = []
        for name, (kind, text) in self._help.items():
            lines.append(f"# HELP {name} {_escape_help(text)}")
            lines.append(f"# TYPE {name} {kind}")
            for key, value in self._values.get(name, {}).items():
                lines.append(f"{name}{_render(key)} {_number(value)}")
            for key, found in self._histograms.get(name, {}).items():
                lines.extend(self._histogram_lines(name, key, found))
        lines.append("# HELP stitch_metrics_dropped_total Samples dropped at the series limit.")
        lines.append("# TYPE stitch_metrics_dropped_total counter")
        lines.append(f"stitch_metrics_dropped_total {self._dropped}")
        return "\n".join(lines) + "\n"

    def _histogram_lines(self, name: str, key: _Labels, found: _Histogram) -> list[str]:
        lines = []
        running = 0
        for bound, count in zip(self._bounds[name], found.buckets, strict=True):
            running += count
            lines.append(f"{name}_bucket{_render((*key, ('le', _number(bound))))} {running}")
        lines.append(f"{name}_bucket{_render((*key, ('le', '+Inf')))} {found.count}")
        lines.append(f"{name}_sum{_render(key)} {_number(found.total)}")
        lines.append(f"{name}_count{_render(key)} {found.count}")
        return lines

    def _room(self, known: bool) -> bool:
        if known:
            return True
        if self._series >= SERIES_MAX:
            self._dropped += 1
            return False
        self._series += 1
        return True


def _key(labels: Mapping[str, str]) -> _Labels:
    return tuple(sorted(labels.items()))


def _render(key: _Labels) -> str:
    if not key:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in key) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _escape_help(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    return (
        str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
    )
