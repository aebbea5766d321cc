"""The engine's Prometheus page."""

from __future__ import annotations

from stitch.engines.embedded.service import Service

__all__ = ["render_metrics"]


def render_metrics(service: Service) -> str:
    """Text exposition format 0.0.4."""
    scheduler = service.scheduler
    stats = scheduler.stats
    gauges = {
        "running": (scheduler.running_count, "Samples in the batch."),
        "waiting": (scheduler.waiting_count, "Samples that wait for their first pass."),
        "paused": (int(scheduler.paused), "1 while no pass may start."),
        "cached_pages": (scheduler.cached_pages, "Pages in the prefix cache."),
        "free_pages": (scheduler.free_pages, "Key/value pages nobody holds."),
    }
    counters = {
        "steps": (stats.steps, "Forward passes that sampled or prefilled."),
        "prompt_tokens": (stats.prompt_tokens, "Prompt tokens of scheduled samples."),
        "cached_tokens": (stats.cached_tokens, "Prompt tokens found in the prefix cache."),
        "output_tokens": (stats.output_tokens, "Tokens sampled."),
        "preemptions": (stats.preemptions, "Samples that gave up their pages."),
        "recomputed_tokens": (stats.recomputed_tokens, "Tokens recomputed on resume."),
        "pauses": (stats.pauses, "Pauses begun."),
        "weight_writes": (stats.weight_writes, "Times that live weights were written."),
    }
    lines: list[str] = []
    for name, (value, help_text) in gauges.items():
        lines += _series(f"stitch_engine_{name}", "gauge", help_text, str(value))
    for name, (value, help_text) in counters.items():
        lines += _series(f"stitch_engine_{name}_total", "counter", help_text, str(value))
    name = "stitch_engine_finished_total"
    lines += [f"# HELP {name} Samples ended, by reason.", f"# TYPE {name} counter"]
    lines += [f'{name}{{reason="{reason}"}} {count}' for reason, count in stats.finished.items()]
    return "\n".join(lines) + "\n"


def _series(name: str, kind: str, help_text: str, value: str) -> list[str]:
    return [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", f"{name} {value}"]
