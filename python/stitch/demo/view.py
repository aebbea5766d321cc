"""What a person sees while the demo runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stitch.demo.record import RunRecord
from stitch.demo.settings import DemoSettings

__all__ = ["LiveView", "PlainView", "View", "byte_text", "open_view"]

_SPARKS = "▁▂▃▄▅▆▇█"
_STATE_STYLE = {"READY": "green", "KILLED": "red", "GONE": "red", "UNKNOWN": "yellow"}
_PLAIN_EVERY = 5
_PROGRESS_S = 5.0


class View(Protocol):
    """One way to show a run."""

    def attach(self, record: RunRecord) -> None:
        """Show this run from now on."""
        ...

    def step(self) -> None:
        """A training step ended, or something else is worth a look."""
        ...

    def progress(self) -> None:
        """The record's phase got on."""
        ...

    def say(self, text: str) -> None:
        """Show one line that stays."""
        ...

    def close(self) -> None:
        """The run is over. Safe to repeat."""
        ...


def open_view(settings: DemoSettings, console: Console) -> View:
    """The live table if `console` is a terminal, else plain lines."""
    return LiveView(settings, console) if console.is_terminal else PlainView(settings, console)


class PlainView:
    """A line every few steps, and every note as it comes."""

    def __init__(self, settings: DemoSettings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._record: RunRecord | None = None
        self._notes = 0
        self._step = 0
        self._progress_s = -_PROGRESS_S

    def attach(self, record: RunRecord) -> None:
        self._record = record

    def step(self) -> None:
        record = self._record
        if record is None:
            return
        with record.lock:
            fresh = record.notes[self._notes :]
            self._notes += len(fresh)
            last = record.steps[-1] if record.steps else None
        for at_s, text in fresh:
            self.say(f"{at_s:6.1f} s  {text}")
        if last is None or last.step == self._step:
            return
        self._step = last.step
        if last.step % _PLAIN_EVERY == 0 or last.step == 1:
            lags = " ".join(_replica_line(record))
            self.say(
                f"{last.at_s:6.1f} s  step {last.step}/{self._settings.steps}  reward "
                f"{last.reward:.3f}  v{last.version}  staleness {last.staleness_mean:.1f}  "
                f"{_bytes_of_last(record)}  {lags}"
            )

    def progress(self) -> None:
        """A line every few seconds."""
        record = self._record
        if record is not None and record.now_s - self._progress_s >= _PROGRESS_S:
            self._progress_s = record.now_s
            self.say(f"{record.now_s:6.1f} s  {record.phase}")

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self.step()


class LiveView:
    """A table that is drawn over and over in place."""

    def __init__(self, settings: DemoSettings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._record: RunRecord | None = None
        self._live: Live | None = None

    def attach(self, record: RunRecord) -> None:
        self._record = record
        self._live = Live(
            console=self._console,
            get_renderable=self._draw,
            refresh_per_second=4,
            transient=False,
        )
        self._live.start()

    def step(self) -> None:
        """The table refreshes by itself."""

    def progress(self) -> None:
        """The phase is drawn with the table."""

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _draw(self) -> RenderableType:
        record = self._record
        if record is None:
            return Text("")
        with record.lock:
            parts = [self._progress(record), _replicas(record), _traffic(record)]
            notes = [f"{at_s:6.1f} s  {text}" for at_s, text in record.notes[-4:]]
        return Panel(
            Group(*parts, Text("\n".join(notes), style="dim")),
            title="stitch demo",
            subtitle=f"{record.phase}, {record.now_s:.0f} s",
        )

    def _progress(self, record: RunRecord) -> RenderableType:
        rewards = [step.reward for step in record.steps]
        last = record.steps[-1] if record.steps else None
        step = last.step if last is not None else 0
        version = f"v{last.version}" if last is not None else "v0"
        reward = f"{last.reward:.3f}" if last is not None else "-"
        width = max(8, min(40, self._console.width - 44))  # the line stays one line
        return Text(
            f"step {step}/{self._settings.steps}   version {version}   reward {reward}  "
            f"{_sparkline(rewards, width)}"
        )


def _replicas(record: RunRecord) -> RenderableType:
    table = Table(expand=True, box=None, pad_edge=False)
    for name in ("replica", "state", "phase", "version", "lag", "gate closed", "swap", "recompute"):
        table.add_column(name)
    for track in record.tracks.values():
        now = track.now
        gone = track.left_s is not None
        table.add_row(
            track.id,
            Text(track.state, style=_STATE_STYLE.get(track.state, "yellow")),
            "" if gone else str(now.get("phase", "")),
            "" if track.served is None else f"v{track.served}",
            "" if gone or now.get("lag") is None else str(now["lag"]),
            *("" if gone else _ms(now.get(k)) for k in ("gate_closed_s", "swap_s", "recompute_s")),
        )
    return table


def _traffic(record: RunRecord) -> RenderableType:
    retries = ", ".join(f"{code} {n}" for code, n in sorted(record.client_retries.items()))
    refused = record.counters.get("stitch_gateway_refusals_total", 0)
    tried = record.counters.get("stitch_gateway_retries_total", 0)
    ages = record.staleness
    return Text(
        f"last publication {_bytes_of_last(record)}   staleness {ages.mean:.2f}, max {ages.max}\n"
        f"requests {record.requests}   refused {refused:.0f}   retries: gateway {tried:.0f}, "
        f"client {retries or 'none'}"
    )


def _replica_line(record: RunRecord) -> list[str]:
    with record.lock:
        return [
            f"{t.id}:{t.state if t.served is None or t.left_s is not None else f'v{t.served}'}"
            for t in record.tracks.values()
        ]


def _bytes_of_last(record: RunRecord) -> str:
    if not record.delta_bytes:
        return "-"
    version = max(record.delta_bytes)
    return f"{byte_text(record.delta_bytes[version])} ({record.kinds.get(version, '?')})"


def byte_text(size: float) -> str:
    """A size as a person reads it: `812 B`, `1.3 kB`, `1.44 MB`."""
    if size < 1e3:
        return f"{size:.0f} B"
    return f"{size / 1e3:.1f} kB" if size < 1e6 else f"{size / 1e6:.2f} MB"


def _ms(seconds: object) -> str:
    return f"{float(seconds) * 1e3:.1f} ms" if isinstance(seconds, int | float) else ""


def _sparkline(values: list[float], width: int) -> str:
    if not values:
        return ""
    stride = max(1, -(-len(values) // width))
    means = [
        sum(values[i : i + stride]) / len(values[i : i + stride])
        for i in range(0, len(values), stride)
    ]
    return "".join(_SPARKS[min(7, max(0, int(value * 8)))] for value in means)
