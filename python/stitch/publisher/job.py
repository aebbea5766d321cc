"""One publication on one rank: what `publish` hands to the pipeline, and what a rank wrote."""

from __future__ import annotations

from dataclasses import dataclass

from stitch.format.wire import FileEntry
from stitch.format.write import EncodedTensor
from stitch.publisher.plan import Offer, Offered
from stitch.publisher.publication import Publication
from stitch.publisher.state import Layer, SealedState, TensorState
from stitch.types import Ref

__all__ = ["Job", "PipelineOptions", "Receipt", "make_offer"]


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """Limits and formats. anchor_ratio: a delta bigger than this share of the model becomes an
    anchor. anchor_every: versions from one anchor to the next at most; None means no limit."""

    encoding: str = "xor"
    checksum_format: str = "xxh3-128"
    anchor_every: int | None = 64
    anchor_ratio: float = 0.9
    file_bytes_max: int = 4 * 2**30


@dataclass(eq=False)
class Job:
    """One publication on this rank, as `publish` left it."""

    publication: Publication
    layer: Layer
    given: frozenset[str]
    encoded: dict[str, EncodedTensor]
    needs_anchor: bool
    encode_s: float
    rollback_of: Ref | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Receipt:
    """What one rank wrote, or why it could not."""

    entries: tuple[FileEntry, ...] = ()
    weight_map: tuple[tuple[str, str], ...] = ()
    error: Exception | None = None


def make_offer(job: Job, after: dict[str, TensorState], sealed: SealedState) -> Offer:
    """What this rank brings: the tensors it gives, and those that it only holds from before."""
    replaces = job.layer.replaces_all()
    names = job.given | after.keys()
    if not replaces:
        names |= sealed.tensors.keys()
    tensors = {}
    for name in names:
        state = after[name] if name in after else sealed.tensors[name]
        blob = job.encoded.get(name)
        given = name in job.given or name in after
        size = len(blob.blob) if blob is not None else 0
        tensors[name] = Offered(state.facts, given, name in after, size)
    needs_anchor = job.needs_anchor or job.layer.on_failed() or not sealed.known
    return Offer(job.publication.ref.version, tensors, needs_anchor, replaces)
