"""Model states in memory: what is sealed, and what publications in flight put on top of it.

The sealed state follows the store alone. Each publication in flight keeps copies of the tensors
it changes and a link to the one it was encoded on, so a failure never leaves a baseline that the
store does not hold: the failed one's changes go over to its successors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from stitch.checksum import Checksum, model_digest, model_digest_updated, tensor_term
from stitch.format.dtypes import nbytes_of
from stitch.types import Ref

__all__ = ["Layer", "SealedState", "TensorFacts", "TensorState", "digest_after"]


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What a manifest says of a tensor, without its bytes."""

    dtype: str
    shape: tuple[int, ...]
    checksum: Checksum

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return nbytes_of(self.dtype, self.shape)

    def term(self, name: str) -> int:
        """What this tensor adds to the model digest."""
        return tensor_term(name, self.dtype, self.shape, self.checksum)


@dataclass(frozen=True, slots=True)
class TensorState:
    """One canonical tensor: its bytes (never written again) and additive checksum.

    `stored`: the bytes, or how to read and check them, each time anew, for a tensor that stays in
    the base's files.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stored: memoryview | Callable[[], memoryview]
    checksum: Checksum

    @property
    def data(self) -> memoryview:
        """The bytes. Raises: Unavailable if the file they lie in changed; OSError."""
        return self.stored if isinstance(self.stored, memoryview) else self.stored()

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return nbytes_of(self.dtype, self.shape)

    @property
    def facts(self) -> TensorFacts:
        """Everything but the bytes."""
        return TensorFacts(self.dtype, self.shape, self.checksum)

    def same_kind(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """Whether dtype and shape agree."""
        return self.dtype == dtype and self.shape == shape


@dataclass(frozen=True)
class SealedState:
    """The state of the last sealed version. Replaced as a whole: other threads read it.

    held: the bytes this rank keeps: of the tensors it gave, and on rank 0 also of those that no
        rank gives. catalog: facts of all tensors, kept on rank 0. Both are None when the state is
        not known (no base yet, or a chain that cannot be rebuilt): only an anchor can follow.
    side_files: config and tokenizer files that an anchor carries, on rank 0.
    """

    ref: Ref
    held: Mapping[str, TensorState] | None
    catalog: Mapping[str, TensorFacts] | None
    model_digest: str | None
    manifest_digest: str | None
    deltas_since_anchor: int = 0
    side_files: Mapping[str, bytes] | None = None

    @property
    def known(self) -> bool:
        """Whether a delta can be encoded against it."""
        return self.held is not None

    @property
    def tensors(self) -> Mapping[str, TensorState]:
        """Name -> tensor; empty when the state is not known."""
        return self.held if self.held is not None else {}

    def view(self, name: str) -> memoryview:
        """The bytes of one tensor."""
        return self.tensors[name].data


@dataclass(eq=False)
class Layer:
    """What one publication puts over the layer, or the sealed state, that it was encoded on.

    `replaces`: its tensors are the whole state, nothing below shows through.
    """

    after: dict[str, TensorState]
    below: Layer | None
    replaces: bool
    failed: bool = False
    sealed: bool = False
    # Failed, but perhaps sealed all the same: its number must not be used again.
    doubtful: bool = False

    @property
    def opaque(self) -> bool:
        """Whether the sealed state does not show through it."""
        layer: Layer | None = self
        while layer is not None:
            if layer.replaces:
                return True
            layer = layer.below
        return False

    def visible(self) -> list[dict[str, TensorState]]:
        """The changes that show through, newest first, down to the sealed state.

        Take this before reading the sealed state: a layer that is sealed in between then shows
        in both, never in neither.
        """
        shown: list[dict[str, TensorState]] = []
        layer: Layer | None = self
        while layer is not None:
            shown.append(layer.after)
            if layer.replaces:
                break
            layer = layer.below
        return shown

    def on_failed(self) -> bool:
        """Whether it was encoded on a publication that failed, so that its deltas are void."""
        return any(layer.failed for layer in self._under())

    def effective(self) -> dict[str, TensorState]:
        """The changes against the sealed state, once everything below has ended."""
        merged = dict(self.after)
        if not self.replaces:
            for layer in self._under():
                merged = {**layer.after, **merged}
                if layer.replaces:
                    break
        return merged

    def replaces_all(self) -> bool:
        """Whether, once everything below has ended, nothing of the sealed state shows through."""
        return self.replaces or any(layer.replaces for layer in self._under())

    def _under(self) -> Iterator[Layer]:
        layer = self.below
        while layer is not None and not layer.sealed:
            yield layer
            layer = layer.below


def digest_after(sealed: SealedState, changed: Mapping[str, TensorFacts], *, replaces: bool) -> str:
    """The model digest once `changed` is in place, in O(changed) unless it replaces everything."""
    added = [facts.term(name) for name, facts in changed.items()]
    if replaces or sealed.model_digest is None:
        return model_digest(added)
    catalog = sealed.catalog or {}
    removed = [catalog[name].term(name) for name in changed if name in catalog]
    return model_digest_updated(sealed.model_digest, removed=removed, added=added)
