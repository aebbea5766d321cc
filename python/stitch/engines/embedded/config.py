"""Knobs of the engine process, with units and limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stitch.errors import InvalidInput

__all__ = ["EngineConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What one engine process serves and within which limits.

    compute_dtype: `float32` widens the stored weights exactly; `bfloat16` computes as stored.
    threads: torch threads. Outputs are proven independent of batch mates at boot for the
        number chosen; one thread is the tested case.
    running_max: requests that share a forward pass. queued_max: requests that wait beyond
        them (also while paused); more get 429.
    context_tokens_max: prompt plus completion; None means what the model's config allows.
    kv_tokens: size of the key/value pool in tokens; None means eight full contexts, from 8192
        to 65536, and at least one.
    prefill_tokens_max: prompt tokens computed per forward pass, so that a long prompt does not
        hold up running requests.
    labelled_only: requests are refused until a label was set once. Under a sidecar a restarted
        process must not answer for the one before it: its weights are not proven yet.
    """

    model: Path
    host: str = "127.0.0.1"
    port: int = 0
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = 1
    running_max: int = 32
    queued_max: int = 512
    context_tokens_max: int | None = None
    kv_tokens: int | None = None
    prefill_tokens_max: int = 256
    prefix_cache: bool = True
    body_bytes_max: int = 16 * 1024 * 1024
    samples_max: int = 128
    seed: int | None = None
    labelled_only: bool = False

    def __post_init__(self) -> None:
        limits = {
            "threads": self.threads,
            "running_max": self.running_max,
            "queued_max": self.queued_max,
            "prefill_tokens_max": self.prefill_tokens_max,
            "samples_max": self.samples_max,
        }
        for name, value in limits.items():
            if value < 1:
                raise InvalidInput(f"{name} must be at least 1, not {value}", param=name)
        if not 0 <= self.port <= 65535:
            raise InvalidInput(f"port {self.port} is not from 0 to 65535", param="port")
