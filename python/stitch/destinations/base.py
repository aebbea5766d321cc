"""The Destination protocol: how staged bytes reach an engine. Never speaks HTTP to clients.

A destination is driven by one reconciler, one call at a time, in the order
prove → (stage → preflight → commit → verify → adopt | undo | discard)*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stitch.checksum import Checksum
from stitch.types import Ref

__all__ = ["Destination", "Proof", "StageRequest", "Staged", "Verified"]


@dataclass(frozen=True, slots=True)
class Proof:
    """What boot proved: live storages against the base checkpoint.

    covered: tensors proven bit for bit. missing: canonical tensors the engine does not hold
    (say, parts it does not load), each with the reason.
    """

    covered: int
    missing: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StageRequest:
    """Bring the canonical state from `base` to `target` through `chain` (local directories of
    publications, oldest first; the first may be an anchor). `attempt` grows at every call.

    An empty chain with `target == base` rewrites what the last proof, scrub or undo found to
    differ. With `from_boot` the chain starts at the engine's boot checkpoint instead of the
    bytes held, and tensors that it does not touch go back to their boot bytes.
    """

    base: Ref
    target: Ref
    chain: Sequence[Path]
    attempt: int
    from_boot: bool = False


@dataclass(frozen=True, slots=True)
class Staged:
    """A verified target, ready to activate. `changed` maps tensor name to expected checksum."""

    base: Ref
    target: Ref
    attempt: int
    changed: Mapping[str, Checksum]
    model_digest: str
    bytes_read: int
    stage_s: float


@dataclass(frozen=True, slots=True)
class Verified:
    """Outcome of a verification: empty `mismatched` means every live byte asked about is right."""

    checked: int
    mismatched: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.mismatched


class Destination(Protocol):
    """One way for staged bytes to reach the engine's live storages."""

    @property
    def name(self) -> str:
        """`disk`, `cpu` or `direct`."""
        ...

    @property
    def digest(self) -> str:
        """Model digest of the canonical state held. Known once `prove` opened the checkpoint."""
        ...

    @property
    def boot_digest(self) -> str:
        """Model digest of the checkpoint that the engine booted from."""
        ...

    async def prove(self) -> Proof:
        """Check every live storage against the canonical state held. Before anything is labelled.

        Raises: CorruptData if a byte differs; Unsupported if the engine cannot be described.
        """
        ...

    def advance(self, attempt: int) -> None:
        """The reconciler sent an order of its own, a label, under `attempt`: later orders of
        this destination must not be older."""
        ...

    async def fence(self, attempt: int) -> None:
        """Make every order of an older attempt void on all ranks, one still on its way included."""
        ...

    async def stage(self, request: StageRequest) -> Staged:
        """Decode, verify every digest, prepare. Touches no live byte; a failure changes nothing.

        Raises: CorruptData, NotVisibleYet, Unavailable (disk or memory full).
        """
        ...

    async def preflight(self, staged: Staged) -> None:
        """Every rank says whether it could commit now. Raises ActivationFailed if one cannot."""
        ...

    async def commit(self, staged: Staged) -> None:
        """Write the live bytes. From the first one the engine's version is unknown.

        Raises: ActivationFailed or EngineUnavailable; then `undo`, or restart the engine.
        """
        ...

    async def verify(self, staged: Staged) -> Verified:
        """Checksum the live bytes of the changed tensors on every rank."""
        ...

    async def undo(self, staged: Staged) -> Verified:
        """Put the old bytes back and verify all live storages in full."""
        ...

    async def adopt(self, staged: Staged) -> None:
        """The staged state is now canonical; the old one may be dropped."""
        ...

    async def discard(self, staged: Staged) -> None:
        """Forget a stage that was not committed. Safe to repeat."""
        ...

    async def scrub(self) -> Verified:
        """Checksum every live storage against the canonical state."""
        ...

    async def close(self) -> None:
        """Remove what this destination wrote. The engine keeps what it serves. Safe to repeat."""
        ...
