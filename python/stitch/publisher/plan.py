"""Who writes what: from every rank's offer to the files of one publication. Pure.

Rank 0 decides and tells the others. A tensor that several ranks give must agree and is written
by the lowest of them; a tensor that none gives is written, in anchors, by a rank that holds it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from stitch.errors import Conflict, InvalidInput, StitchError
from stitch.publisher.state import TensorFacts
from stitch.types import Kind

__all__ = [
    "FilePlan",
    "Offer",
    "Offered",
    "Plan",
    "assign_files",
    "check_names",
    "merge_offers",
    "owners_of",
]


@dataclass(frozen=True, slots=True)
class Offered:
    """One tensor of one rank: `given` in this publication, or only held from before."""

    facts: TensorFacts
    given: bool
    changed: bool
    blob_bytes: int


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank brings to one publication, or why it cannot."""

    version: int
    tensors: Mapping[str, Offered]
    needs_anchor: bool
    replaces: bool
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One data file and the tensors in it."""

    name: str
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Rank 0's decision. `files[r]` is what rank r writes; `existing` is the manifest digest of an
    equal version that is sealed already, so that nothing is written. `retry`: that version is not
    above the sealed state, so nothing else happens either."""

    kind: Kind
    attempt: str
    files: tuple[tuple[FilePlan, ...], ...]
    target_digest: str
    existing: str | None = None
    retry: bool = False


def merge_offers(offers: Sequence[Offer]) -> dict[str, TensorFacts]:
    """The changed tensors over all ranks.

    Raises: the first rank's error; Conflict if ranks speak of different versions; InvalidInput if
        two ranks give one tensor with different bytes.
    """
    for rank, offer in enumerate(offers):
        if offer.error is not None:
            if len(offers) == 1:
                raise offer.error
            error = offer.error
            if not isinstance(error, StitchError):
                raise error
            raise type(error)(f"rank {rank}: {error.message}", **error.fields) from error
    if len({offer.version for offer in offers}) != 1:
        found = [offer.version for offer in offers]
        raise Conflict(f"ranks publish different versions at once: {found}", found=found)
    if len({offer.replaces for offer in offers}) != 1:
        raise Conflict("some ranks rebase and others do not")
    changed: dict[str, TensorFacts] = {}
    first: dict[str, tuple[int, Offered]] = {}
    for rank, offer in enumerate(offers):
        for name, tensor in offer.tensors.items():
            if not tensor.given:
                continue
            before = first.setdefault(name, (rank, tensor))
            theirs, ours = before[1], tensor
            if (theirs.facts, theirs.changed) != (ours.facts, ours.changed):
                raise InvalidInput(
                    f"ranks {before[0]} and {rank} give different bytes for tensor {name!r}",
                    tensor=name,
                )
            if tensor.changed:
                changed[name] = tensor.facts
    return changed


def check_names(found: Collection[str], wanted: Collection[str]) -> None:
    """An anchor holds every tensor of the model. Raises: InvalidInput naming a missing one."""
    missing = set(wanted) - set(found)
    if missing:
        raise InvalidInput(
            f"the next version must be an anchor with every tensor of the model; {min(missing)!r} "
            f"and {len(missing) - 1} more were not given",
            tensor=min(missing),
        )


def owners_of(offers: Sequence[Offer], *, kind: Kind) -> dict[str, int]:
    """The rank that writes each tensor of the publication."""
    owners: dict[str, int] = {}
    held: dict[str, int] = {}
    for rank, offer in enumerate(offers):
        for name, tensor in offer.tensors.items():
            if not tensor.given:
                held.setdefault(name, rank)
            elif kind is Kind.ANCHOR or tensor.changed:
                owners.setdefault(name, rank)
    return {**held, **owners} if kind is Kind.ANCHOR else owners


def assign_files(
    offers: Sequence[Offer], *, kind: Kind, file_bytes_max: int
) -> list[list[list[str]]]:
    """For each rank the tensors of each of its files, in name order, split at `file_bytes_max`."""
    assigned: list[list[list[str]]] = [[] for _ in offers]
    filled = [0] * len(offers)
    for name, rank in sorted(owners_of(offers, kind=kind).items()):
        tensor = offers[rank].tensors[name]
        size = tensor.facts.nbytes if kind is Kind.ANCHOR else tensor.blob_bytes
        if not assigned[rank] or filled[rank] + size > file_bytes_max:
            assigned[rank].append([])
            filled[rank] = 0
        assigned[rank][-1].append(name)
        filled[rank] += size
    return assigned
