"""The `disk` destination: staged bytes in synced safetensors files, read by the engine's loader."""

from __future__ import annotations

from pathlib import Path

from stitch.destinations.copying import CopyingConfig, CopyingDestination
from stitch.destinations.overlays import OverlayRoot
from stitch.engines.base import Engine
from stitch.env import Env

__all__ = ["DiskDestination"]


class DiskDestination(CopyingDestination):
    """Keeps overlays under `work_dir` on the local disk, in little host memory.

    Args:
        base_dir: the checkpoint that the engine booted from; kept as it is, read in place.
    """

    name = "disk"
    via = "disk"

    def __init__(
        self,
        engine: Engine,
        incarnation: str,
        *,
        base_dir: Path,
        work_dir: Path,
        env: Env,
        config: CopyingConfig | None = None,
    ) -> None:
        super().__init__(
            engine,
            incarnation,
            base_dir=base_dir,
            overlays=OverlayRoot(work_dir, env, sync=True),
            config=config or CopyingConfig(),
            env=env,
        )
