"""One rank of a torch.distributed job that publishes, as a script of steps, for tests."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

from stitch.errors import StitchError, Unavailable
from stitch.publisher import Publisher
from stitch.stores import open_store
from stitch.testing.watched_store import watched

__all__ = ["RankScript", "Step", "run_rank"]

EXIT_DEAD: Final = 9

Tensors = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Step:
    """One collective publish: what each rank gives. Torch tensors are made of the arrays.

    fail_put_on: the rank whose upload breaks. die_on: the rank whose process ends while the
    publication is under way. rollback_to: roll back instead of publishing.
    """

    tensors: Sequence[Tensors] = ()
    anchor: bool = False
    fail_put_on: int | None = None
    die_on: int | None = None
    rollback_to: int | None = None


@dataclass(frozen=True)
class RankScript:
    """What all ranks do together. Each outcome is `(version, kind, files, changed)` or an error."""

    steps: Sequence[Step]
    options: Mapping[str, Any] = field(default_factory=dict)


def run_rank(
    rank: int, size: int, meet: str, root: str, script: RankScript, connection: Connection
) -> None:
    """Join the group, run every step, report the outcomes as a list."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{meet}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    watcher, store = watched(open_store(root))
    outcomes: list[Any] = []
    with Publisher(
        store, run_id="a", group=dist.group.WORLD, threads=1, **script.options
    ) as publisher:
        for step in script.steps:
            if step.die_on == rank:
                watcher.gate.clear()
            if step.fail_put_on == rank:
                watcher.fail_next("put", Unavailable("this rank's disk is full"))
            try:
                outcomes.append(_outcome(publisher, step, rank))
            except StitchError as error:
                outcomes.append((error.code, error.message))
    connection.send(outcomes)
    if all(step.die_on is None for step in script.steps):
        dist.barrier()
    dist.destroy_process_group()


def _outcome(publisher: Publisher, step: Step, rank: int) -> Any:
    import torch

    if step.rollback_to is not None:
        publication = publisher.rollback(step.rollback_to)
    else:
        given = {name: torch.from_numpy(array.copy()) for name, array in step.tensors[rank].items()}
        publication = publisher.publish(given, anchor=step.anchor)
        for tensor in given.values():
            tensor.fill_(77)
        if step.die_on == rank:
            os._exit(EXIT_DEAD)
    done = publication.wait(60)
    return (done.ref.version, done.kind.value, done.files, done.changed)
