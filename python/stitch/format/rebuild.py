"""Rebuilding a model state: a base, or the newest anchor, with every later delta applied.

Nothing that a source holds is ever written: each changed tensor is built in fresh memory, so a
corrupt chain damages nothing. Every digest that the chain carries is checked at its own step.
Files are read, not mapped: one that is cut short meanwhile is an error and not a signal, and what
is delivered is what was checked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NoReturn, Protocol, runtime_checkable

import numpy as np

from stitch import _core
from stitch.checksum import (
    Checksum,
    additive_lanes,
    blake3,
    lane_bytes_for,
    model_digest,
    model_digest_updated,
    tensor_term,
)
from stitch.errors import CorruptData, InvalidInput
from stitch.format.dtypes import bits_of
from stitch.format.publication import PublicationReader
from stitch.types import Kind

__all__ = [
    "IN_FLIGHT_BYTES_MAX",
    "ReadableSource",
    "RebuildCancelled",
    "RebuildReport",
    "RebuiltTensor",
    "TensorInfo",
    "TensorSource",
    "rebuild",
]

IN_FLIGHT_BYTES_MAX: Final = 1 << 30
_COMPARE_CHUNK: Final = 8 << 20


class TensorInfo(Protocol):
    """What a source says of one canonical tensor."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


class TensorSource(Protocol):
    """A held model state: a `Checkpoint`, or a replica's canonical bytes. Thread-safe."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    def view(self, name: str) -> memoryview:
        """The tensor's bytes. They must not change while a rebuild runs."""
        ...


@runtime_checkable
class ReadableSource(Protocol):
    """A source that lies in files, which others could cut short: read rather than viewed."""

    def read(self, name: str) -> memoryview:
        """The tensor's bytes. If they are writable, nobody else holds that memory."""
        ...


class RebuildCancelled(Exception):
    """`cancelled()` said so. What was delivered so far verified, but the set is incomplete."""


@dataclass(frozen=True, slots=True)
class RebuiltTensor:
    """One tensor in its final state, verified. `data` is read-only use; `changed` against base."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    checksum: Checksum
    changed: bool


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What a rebuild gave.

    changed: names delivered as changed, in delivery order. removed: base tensors that an anchor
    no longer has. checksums: of every tensor of the final state. bytes_read: payload bytes.
    """

    changed: tuple[str, ...]
    removed: tuple[str, ...]
    model_digest: str
    checksums: Mapping[str, Checksum]
    bytes_read: int


def rebuild(
    base: TensorSource,
    chain: Sequence[PublicationReader],
    *,
    on_tensor: Callable[[RebuiltTensor], None],
    threads: int = 1,
    cancelled: Callable[[], bool] = lambda: False,
    base_version: int | None = None,
    base_checksums: Mapping[str, Checksum] | None = None,
    everything: bool = False,
    in_flight_bytes_max: int = IN_FLIGHT_BYTES_MAX,
) -> RebuildReport:
    """Fold `chain` onto `base` and deliver each changed tensor once, in its final state.

    Args:
        chain: oldest first. With an anchor in it, the newest one is the source and what comes
            before it is ignored; changed then means other bytes, dtype or shape than in base.
        on_tensor: called in the calling thread, in the source's order, only with a tensor whose
            every digest verified. `data` may be kept.
        base_version: the version that `base` is, if known: the first delta must apply to it.
        base_checksums: of all base tensors, if known; else they are computed, O(model).
        everything: deliver unchanged tensors too.
        in_flight_bytes_max: bound on the memory of tensors read or built and not yet delivered;
            one tensor is always allowed.
    Raises: CorruptData naming version, file and tensor: broken lineage, a tensor that the source
        lacks, a bad payload, a digest that differs, a model digest that differs (then all
        deliveries must be dropped); Unavailable if a file changed or vanished meanwhile;
        OSError; RebuildCancelled; whatever `on_tensor` raises.
    """
    fold = _Fold(base, chain, base_version, base_checksums, everything)
    changed: list[str] = []
    finals: dict[str, Checksum] = {}
    for done in _in_order(fold, threads, in_flight_bytes_max):
        if cancelled():
            raise RebuildCancelled
        finals[done.tensor.name] = done.tensor.checksum
        fold.ledger.record(done)
        if done.tensor.changed:
            changed.append(done.tensor.name)
        if done.tensor.changed or everything:
            on_tensor(done.tensor)
    digest = fold.ledger.verify()
    removed = tuple(sorted(base.tensors.keys() - fold.source.tensors.keys()))
    return RebuildReport(tuple(changed), removed, digest, finals, fold.bytes_read)


@dataclass(frozen=True, slots=True)
class _Done:
    tensor: RebuiltTensor
    source_sum: Checksum
    # Checksum after each delta that lists the tensor, keyed by the delta's place in the chain.
    step_sums: Mapping[int, Checksum]


class _Fold:
    """The plan of one rebuild, and the work on one tensor."""

    def __init__(
        self,
        base: TensorSource,
        chain: Sequence[PublicationReader],
        base_version: int | None,
        base_checksums: Mapping[str, Checksum] | None,
        everything: bool,
    ) -> None:
        self.base = base
        self.everything = everything
        anchor_at = max((i for i, p in enumerate(chain) if p.kind == Kind.ANCHOR), default=-1)
        self.anchor = chain[anchor_at] if anchor_at >= 0 else None
        self.deltas = chain[anchor_at + 1 :]
        self.source: TensorSource = base
        self.known = base_checksums or {}
        if self.anchor is not None:
            assert self.anchor.checkpoint is not None
            self.source, self.known = self.anchor.checkpoint, {}
        _check_lineage(self.anchor, self.deltas, base_version)
        self.steps: dict[str, list[int]] = {}
        for at, delta in enumerate(self.deltas):
            for name in delta.payloads:
                self._check_listed(delta, name)
                self.steps.setdefault(name, []).append(at)
        self.bytes_read = sum(p.nbytes for d in self.deltas for p in d.payloads.values())
        if self.anchor is not None:
            self.bytes_read += sum(t.nbytes for t in self.source.tensors.values())
        self.ledger = _Ledger(self.source, self.anchor, self.deltas)

    def _check_listed(self, delta: PublicationReader, name: str) -> None:
        tensor = self.source.tensors.get(name)
        if tensor is None:
            _refuse(delta, name, "the checkpoint it applies to has no such tensor")
        if delta.manifest is not None:
            entry = delta.manifest.tensors[name]
            if (entry.dtype, tuple(entry.shape)) != (tensor.dtype, tuple(tensor.shape)):
                _refuse(
                    delta,
                    name,
                    f"it is {entry.dtype} {entry.shape}, the checkpoint's is {tensor.dtype} "
                    f"{list(tensor.shape)}; a new dtype or shape needs a full version",
                )

    def cost(self, name: str) -> int:
        """Bytes of fresh memory that `tensor(name)` takes, the largest payload aside."""
        read = isinstance(self.source, ReadableSource) and self._needs_bytes(name)
        nbytes = self.source.tensors[name].nbytes
        return nbytes if read or name in self.steps else 0

    def _needs_bytes(self, name: str) -> bool:
        return (
            self.everything
            or self.anchor is not None
            or name in self.steps
            or name not in self.known
        )

    def tensor(self, name: str) -> _Done:
        """Build one tensor: every step applied and verified. Runs in a worker thread."""
        info = self.source.tensors[name]
        shape = tuple(info.shape)
        lane = lane_bytes_for(shape, bits_of(info.dtype))
        data = _read(self.source, name) if self._needs_bytes(name) else memoryview(b"")
        source_sum = self.known.get(name)
        if source_sum is None:
            source_sum = additive_lanes(data, lane_bytes=lane)
        if self.anchor is not None:
            _check_sum(self.anchor, name, source_sum)
        checksum = source_sum
        step_sums: dict[int, Checksum] = {}
        if name in self.steps:
            out = np.empty(info.nbytes, np.uint8).data if data.readonly else data
            for at in self.steps[name]:
                checksum = _apply(self.deltas[at], name, data, out, lane)
                step_sums[at] = checksum
                data = out
        changed = name in self.steps if self.anchor is None else self._differs(info, data)
        rebuilt = RebuiltTensor(name, info.dtype, shape, data.toreadonly(), checksum, changed)
        return _Done(rebuilt, source_sum, step_sums)

    def _differs(self, info: TensorInfo, data: memoryview) -> bool:
        held = self.base.tensors.get(info.name)
        if held is None or (held.dtype, tuple(held.shape)) != (info.dtype, tuple(info.shape)):
            return True
        old = np.frombuffer(_read(self.base, info.name), np.uint8)
        new = np.frombuffer(data, np.uint8)
        return any(
            not np.array_equal(old[at : at + _COMPARE_CHUNK], new[at : at + _COMPARE_CHUNK])
            for at in range(0, len(new), _COMPARE_CHUNK)
        )


class _Ledger:
    """The model digests that manifests promise, recomputed from the tensors' checksums."""

    def __init__(
        self,
        source: TensorSource,
        anchor: PublicationReader | None,
        deltas: Sequence[PublicationReader],
    ) -> None:
        self._source = source
        self._anchor = anchor
        self._deltas = deltas
        self._source_terms: list[int] = []
        self._removed: list[list[int]] = [[] for _ in deltas]
        self._added: list[list[int]] = [[] for _ in deltas]

    def record(self, done: _Done) -> None:
        """Note one tensor's checksums at the source and after each delta."""
        tensor = done.tensor
        term = tensor_term(tensor.name, tensor.dtype, tensor.shape, done.source_sum)
        self._source_terms.append(term)
        for at, checksum in sorted(done.step_sums.items()):
            self._removed[at].append(term)
            term = tensor_term(tensor.name, tensor.dtype, tensor.shape, checksum)
            self._added[at].append(term)

    def verify(self) -> str:
        """Compare every promised digest. Returns the final one. Raises: CorruptData."""
        digest = model_digest(self._source_terms)
        if self._anchor is not None and self._anchor.manifest is not None:
            _check_digest(self._anchor, "target", self._anchor.manifest.target_digest, digest)
        for at, delta in enumerate(self._deltas):
            if delta.manifest is not None:
                _check_digest(delta, "base", delta.manifest.base_digest, digest)
            digest = model_digest_updated(digest, removed=self._removed[at], added=self._added[at])
            if delta.manifest is not None:
                _check_digest(delta, "target", delta.manifest.target_digest, digest)
        return digest


def _in_order(fold: _Fold, threads: int, bytes_max: int) -> Iterator[_Done]:
    """Results in the source's order; work runs ahead within `bytes_max`."""
    waiting: deque[tuple[int, Future[_Done]]] = deque()
    in_flight = 0
    pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="stitch-rebuild")
    try:
        for name in fold.source.tensors:
            cost = fold.cost(name)
            while waiting and (in_flight + cost > bytes_max or len(waiting) >= 4 * threads + 4):
                freed, future = waiting.popleft()
                yield future.result()
                in_flight -= freed
            waiting.append((cost, pool.submit(fold.tensor, name)))
            in_flight += cost
        while waiting:
            yield waiting.popleft()[1].result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _read(source: TensorSource, name: str) -> memoryview:
    return source.read(name) if isinstance(source, ReadableSource) else source.view(name)


def _apply(
    delta: PublicationReader, name: str, base: memoryview, out: memoryview, lane: int
) -> Checksum:
    """One delta on one tensor, verified. `out` is disjoint from `base`, or is `base`."""
    payload = delta.payloads[name]
    native = "none" if delta.checksum_format == "blake3" else str(delta.checksum_format)
    apply = _core.xor_apply if delta.encoding == "xor" else _core.overwrite_apply
    try:
        found, sums = apply(delta.blob(name), base, out, native, lane)
    except (CorruptData, InvalidInput) as error:
        _refuse(delta, name, error.message, error)
    if delta.checksum_format == "blake3":
        found = blake3(out)
    if found != payload.digest:
        reason = (
            f"{delta.checksum_format} of the result is {found}, the publication says "
            f"{payload.digest}"
        )
        _refuse(delta, name, reason, found=found, expected=payload.digest)
    assert sums is not None
    checksum = Checksum(lane, *sums)
    _check_sum(delta, name, checksum)
    return checksum


def _check_sum(publication: PublicationReader, name: str, found: Checksum) -> None:
    if publication.manifest is None:
        return
    expected = publication.manifest.tensors[name].checksum
    if found.to_text() != expected:
        _refuse(
            publication,
            name,
            f"its checksum is {found.to_text()}, the manifest says {expected}",
            found=found.to_text(),
            expected=expected,
        )


def _check_digest(
    publication: PublicationReader, which: str, expected: str | None, found: str
) -> None:
    if expected is not None and expected != found:
        reason = f"its {which}_digest is {expected}, the tensors give {found}"
        raise CorruptData(
            f"{publication.directory.name}: {reason}",
            version=publication.version,
            reason=reason,
            found=found,
            expected=expected,
        )


def _check_lineage(
    anchor: PublicationReader | None,
    deltas: Sequence[PublicationReader],
    base_version: int | None,
) -> None:
    if anchor is None and deltas and base_version is not None:
        _check_applies(deltas[0], base_version)
    chain = [*([anchor] if anchor is not None else []), *deltas]
    for before, after in pairwise(chain):
        _check_applies(after, before.version)
        if after.manifest is None:
            continue
        if after.manifest.parent not in (None, before.manifest_digest):
            _refuse(after, None, f"its parent is not the {before.directory.name} that is there")
        if before.manifest is not None:
            if after.manifest.ref.run_id != before.manifest.ref.run_id:
                _refuse(after, None, f"it is of another run than {before.directory.name}")
            if after.manifest.base_digest != before.manifest.target_digest:
                _refuse(after, None, f"its base_digest is not {before.directory.name}'s target")


def _check_applies(delta: PublicationReader, version: int) -> None:
    if delta.base_version != version:
        reason = f"it applies to version {delta.base_version}, the one before it is {version}"
        _refuse(delta, None, reason)


def _refuse(
    publication: PublicationReader,
    tensor: str | None,
    reason: str,
    cause: BaseException | None = None,
    **facts: object,
) -> NoReturn:
    payload = publication.payloads.get(tensor) if tensor is not None else None
    file = payload.path.name if payload is not None else None
    where = "/".join(part for part in (publication.directory.name, file) if part)
    at = where if tensor is None else f"{where}: tensor {tensor!r}"
    raise CorruptData(
        f"{at}: {reason}",
        file=file,
        tensor=tensor,
        version=publication.version,
        reason=reason,
        **facts,
    ) from cause
