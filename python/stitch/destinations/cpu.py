"""The `cpu` destination: staged bytes in memory-backed files, copied by the ranks in the pause."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from stitch.destinations.copying import CopyingConfig, CopyingDestination
from stitch.destinations.overlays import OverlayRoot
from stitch.engines.base import Engine
from stitch.env import Env

__all__ = ["MEMORY_DIRECTORY", "CpuDestination"]

log = logging.getLogger(__name__)

MEMORY_DIRECTORY: Final = Path("/dev/shm")


class CpuDestination(CopyingDestination):
    """Keeps overlays in host memory.

    Args:
        base_dir: the checkpoint that the engine booted from; kept as it is, read in place.
        work_dir: used for overlays, with a warning, where the machine has no memory-backed
            file system.
        ram_dir: the memory-backed directory.
    """

    name = "cpu"
    via = "cpu"

    def __init__(
        self,
        engine: Engine,
        incarnation: str,
        *,
        base_dir: Path,
        work_dir: Path,
        env: Env,
        ram_dir: Path = MEMORY_DIRECTORY,
        config: CopyingConfig | None = None,
    ) -> None:
        parent = ram_dir
        if not env.files.is_directory(ram_dir):
            log.warning(
                "no memory-backed directory; staging on disk",
                extra={"ram_dir": str(ram_dir), "work_dir": str(work_dir)},
            )
            parent = work_dir
        super().__init__(
            engine,
            incarnation,
            base_dir=base_dir,
            overlays=OverlayRoot(parent, env, sync=False),
            config=config or CopyingConfig(),
            env=env,
        )
