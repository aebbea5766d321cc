"""Choose the one next step of a replica. Pure: no I/O, no clock, no logging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stitch.errors import Conflict, CorruptData, StitchError
from stitch.types import Ref

__all__ = [
    "Activate",
    "BaseMatch",
    "Idle",
    "Observed",
    "Recover",
    "Refuse",
    "Relabel",
    "Reload",
    "Stage",
    "Step",
    "SwitchRun",
    "match_base",
    "next_step",
]

# How the bytes held compare with a run's declared base: equal by digest, different by digest,
# or not comparable because the run declares no digest.
BaseMatch = Literal["equal", "differs", "unproven"]


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do: no pointer, or it names what is served."""


@dataclass(frozen=True, slots=True)
class Recover:
    """The live weights are not known; find out or rewrite them before anything else."""


@dataclass(frozen=True, slots=True)
class Relabel:
    """The bytes in use are exactly those of `target`: only the name changes."""

    target: Ref


@dataclass(frozen=True, slots=True)
class Stage:
    """Prepare `target` while serving. If the range turns out empty it becomes a Relabel."""

    target: Ref


@dataclass(frozen=True, slots=True)
class Reload:
    """Prepare `target` without relying on the bytes held, which are not the run's base."""

    target: Ref


@dataclass(frozen=True, slots=True)
class SwitchRun:
    """Prepare `target`, of another run; its activation drains everything."""

    target: Ref


@dataclass(frozen=True, slots=True)
class Activate:
    """Make the staged `target` the one in use. `drain_all` at a run switch."""

    target: Ref
    drain_all: bool


@dataclass(frozen=True, slots=True)
class Refuse:
    """The pointer asks for something a replica never does; report it and keep serving."""

    error: StitchError


Step = Idle | Recover | Relabel | Stage | Reload | SwitchRun | Activate | Refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything a decision rests on.

    known: the live weights are proven to be the canonical state held.
    served: the label in use; None if the bytes held have no name yet.
    boot: what the boot checkpoint counts as while `served` is None: the configured ref, or the
        boot version of the pointer's run; None if there is neither.
    boot_match: how the bytes held compare with that run's declared base.
    staged: a prepared target, and `superseded` how often in a row it replaced an older one.
    fork: the boot ref of the pointer's run when the bytes held equal that run's base by digest.
    """

    known: bool
    latest: Ref | None
    served: Ref | None
    boot: Ref | None = None
    boot_match: BaseMatch = "unproven"
    fork: Ref | None = None
    staged: Ref | None = None
    superseded: int = 0
    superseded_max: int = 2


def match_base(held_digest: str, base_digest: str | None) -> BaseMatch:
    """Compare the model digest held with the one a run declares for its base."""
    if base_digest is None:
        return "unproven"
    return "equal" if held_digest == base_digest else "differs"


def next_step(seen: Observed) -> Step:
    """The next step. Repeating it with the step performed ends in Idle."""
    if not seen.known:
        return Recover()
    if seen.served is None:
        return _name_the_boot(seen)
    latest, served = seen.latest, seen.served
    if latest is None or latest == served:
        return Idle()
    if latest.run_id != served.run_id:
        if seen.fork is not None:
            return Relabel(seen.fork)
        return _staged_or(seen, latest, SwitchRun(latest), drain_all=True)
    if latest.version < served.version:
        return Refuse(
            Conflict(
                f"the pointer names {latest} but {served} is served; within a run versions only "
                "grow: publish the old weights under a new version instead",
                found=str(latest),
                served=str(served),
            )
        )
    return _staged_or(seen, latest, Stage(latest), drain_all=False)


def _name_the_boot(seen: Observed) -> Step:
    if seen.boot is not None and seen.boot_match != "differs":
        return Relabel(seen.boot)
    if seen.latest is None:
        if seen.boot is not None:
            return Refuse(
                CorruptData(
                    f"the engine's checkpoint is not the base of run {seen.boot.run_id!r}: its "
                    "model digest differs; start the engine from that run's base"
                )
            )
        return Idle()
    return _staged_or(seen, seen.latest, Reload(seen.latest), drain_all=True)


def _staged_or(seen: Observed, latest: Ref, prepare: Step, *, drain_all: bool) -> Step:
    staged = seen.staged
    if staged is None or staged.run_id != latest.run_id or staged.version > latest.version:
        return prepare
    if staged == latest or seen.superseded >= seen.superseded_max:
        return Activate(staged, drain_all)
    return prepare
