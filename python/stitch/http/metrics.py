"""Counters and Prometheus text. A metrics fault never reaches a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["PROMETHEUS", "Counters", "gauge"]

PROMETHEUS: Final = b"text/plain; version=0.0.4; charset=utf-8"


class Counters:
    """Counters that only grow. Names and help texts are given up front."""

    def __init__(self, help_texts: Mapping[str, str]) -> None:
        self._help = dict(help_texts)
        self._values: dict[str, dict[str, float]] = {name: {"": 0.0} for name in help_texts}

    def add(self, name: str, amount: float = 1.0, *, labels: str = "") -> None:
        """Count. `labels` is the text between the braces. A negative amount is ignored."""
        series = self._values.get(name)
        if series is None or amount < 0:
            return
        series[labels] = series.get(labels, 0.0) + amount

    def value(self, name: str) -> float:
        """The sum over all label sets."""
        return sum(self._values.get(name, {}).values())

    def render(self) -> str:
        """The Prometheus text."""
        parts: list[str] = []
        for name, series in self._values.items():
            parts.append(f"# HELP {name} {self._help[name]}\n# TYPE {name} counter\n")
            labelled = len(series) > 1
            for labels, value in series.items():
                if labels or not labelled:
                    parts.append(
                        f"{name}{{{labels}}} {value:g}\n" if labels else f"{name} {value:g}\n"
                    )
        return "".join(parts)


def gauge(name: str, help_text: str, values: Iterable[tuple[str, float]]) -> str:
    """One gauge family: pairs of label text (may be empty) and value."""
    lines = [f"# HELP {name} {help_text}\n# TYPE {name} gauge\n"]
    for labels, value in values:
        lines.append(f"{name}{{{labels}}} {value:g}\n" if labels else f"{name} {value:g}\n")
    return "".join(lines)
