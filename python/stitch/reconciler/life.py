"""One incarnation: the engine's life, what its ranks were told, and what is known of its bytes."""

from __future__ import annotations

from dataclasses import dataclass

from stitch.destinations.base import Destination, Staged
from stitch.errors import EngineUnavailable
from stitch.reconciler.control import EngineControl
from stitch.reconciler.status import ReplicaStatus
from stitch.types import GateState, Label, Ref

__all__ = ["UNNAMED", "Life", "lose"]

# Stands for bytes without a name where a stage needs a ref. Never served, never labelled.
UNNAMED = Ref("unnamed", 0)


@dataclass(slots=True)
class Life:
    """Owned by the reconciler's task.

    known: the live weights are proven to be the destination's canonical state. held: the ref of
    that state, None while it has no name. base_judged: the store proved or disproved the boot
    checkpoint's name, or it no longer matters. proven: the destination proved or listed its ranks.
    staged: a prepared target, and how often in a row it superseded an older one. crossed_epoch:
    requests admitted before this epoch crossed it, and a flush is due when they have ended.
    """

    incarnation: str
    boot_id: str
    destination: Destination
    control: EngineControl
    attempt: int = 1
    epoch: int = 0
    known: bool = False
    proven: bool = False
    held: Ref | None = None
    base_judged: bool = False
    staged: Staged | None = None
    superseded: int = 0
    crossed_epoch: int | None = None

    def next_attempt(self) -> int:
        """A fresh attempt number; older orders become void."""
        self.attempt += 1
        return self.attempt

    def label_attempt(self) -> int:
        """A fresh attempt number for a label order sent outside an activation."""
        attempt = self.next_attempt()
        self.destination.advance(attempt)
        return attempt

    def next_label(self, ref: Ref) -> Label:
        """A label with a fresh epoch: after every activation and undo."""
        self.epoch += 1
        return Label(ref, self.epoch)


def lose(life: Life, status: ReplicaStatus) -> None:
    """The live weights are not known any more: serve nothing, end what runs, recover first."""
    life.known = False
    status.known = False
    status.swapping = False
    gate = status.gate
    assert gate.state is not GateState.DRAINING_PINS, "a drain is under way"
    gate.open(None)
    gate.abort_all(
        EngineUnavailable("the weights in use are not known on this replica; try another one")
    )
    status.changed()
