"""The canonical state a replica holds: tensor names to immutable bytes, and rebuilding it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stitch.checksum import Checksum, model_digest, tensor_term
from stitch.destinations.overlays import OverlayRoot
from stitch.engines.base import TensorSlice
from stitch.errors import CorruptData
from stitch.format.checkpoint import Checkpoint
from stitch.format.mapping import MappedFile
from stitch.format.publication import PublicationReader
from stitch.format.rebuild import (
    ReadableSource,
    RebuildReport,
    RebuiltTensor,
    TensorInfo,
    TensorSource,
    rebuild,
)

__all__ = [
    "CanonicalState",
    "MappedState",
    "chain_legs",
    "compacted",
    "fold_legs",
    "open_boot",
    "rebuilt",
]


@dataclass(frozen=True, slots=True)
class CanonicalState:
    """One model state, never changed: where each tensor's bytes lie, checksums, model digest."""

    slices: Mapping[str, TensorSlice]
    checksums: Mapping[str, Checksum]
    digest: str

    def directories(self) -> set[Path]:
        """The directories that hold any of its bytes."""
        return {Path(part.path).parent for part in self.slices.values()}


@dataclass(slots=True)
class MappedState:
    """A CanonicalState as rebuild's source; files are opened on first use. Thread-safe."""

    state: CanonicalState
    _maps: dict[str, MappedFile] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.state.slices

    def view(self, name: str) -> memoryview:
        part = self.state.slices[name]
        return self._file(part.path).view(part.offset, part.nbytes)

    def read(self, name: str) -> memoryview:
        """The tensor's bytes in fresh memory: a file cut short is an error, not a signal."""
        part = self.state.slices[name]
        return self._file(part.path).read(part.offset, part.nbytes)

    def close(self) -> None:
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()

    def _file(self, path: str) -> MappedFile:
        with self._lock:
            found = self._maps.get(path)
            if found is None:
                found = self._maps[path] = MappedFile(Path(path))
        return found


class _Layered:
    """A source with some tensors replaced by rebuilt ones held in memory."""

    def __init__(self, below: TensorSource, over: Sequence[RebuiltTensor]) -> None:
        self._below = below
        self._over = {tensor.name: tensor for tensor in over}
        self._sizes = {tensor.name: _Info(tensor) for tensor in over}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {**self._below.tensors, **self._sizes}

    def view(self, name: str) -> memoryview:
        found = self._over.get(name)
        return found.data if found is not None else self._below.view(name)

    def read(self, name: str) -> memoryview:
        """As the source below reads; what is held in memory already is read-only."""
        if name in self._over or not isinstance(self._below, ReadableSource):
            return self.view(name)
        return self._below.read(name)


class _Info:
    """A rebuilt tensor as a source describes it."""

    def __init__(self, tensor: RebuiltTensor) -> None:
        self.name = tensor.name
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.nbytes = len(tensor.data)


def open_boot(directory: Path, *, threads: int) -> CanonicalState:
    """The boot checkpoint as a canonical state. O(bytes): every checksum is computed.

    Raises: InvalidInput if `directory` is no checkpoint; CorruptData for damage.
    """
    with Checkpoint.open(directory) as checkpoint:
        checksums = checkpoint.checksums(threads=threads)
        slices = {
            name: TensorSlice(
                name,
                str(tensor.path),
                tensor.offset,
                tensor.nbytes,
                tensor.dtype,
                tuple(tensor.shape),
                checksums[name].to_text(),
            )
            for name, tensor in checkpoint.tensors.items()
        }
    digest = model_digest(
        tensor_term(name, part.dtype, part.shape, checksums[name]) for name, part in slices.items()
    )
    return CanonicalState(slices, checksums, digest)


def fold_legs(
    start: TensorSource,
    legs: Sequence[Sequence[PublicationReader]],
    *,
    on_tensor: Callable[[RebuiltTensor], None],
    threads: int,
    everything: bool,
    cancelled: Callable[[], bool] = lambda: False,
    base_version: int | None = None,
    base_checksums: Mapping[str, Checksum] | None = None,
) -> RebuildReport:
    """Fold a chain that may cross forks, leg by leg: a run's versions follow only each other.

    base_version: the version `start` is, if it is of the first leg's run. Otherwise as
    `rebuild`, except that tensors which only an earlier leg changed are delivered as unchanged,
    so with several legs everything is delivered.
    """
    below: TensorSource = start
    for leg in legs[:-1]:
        over: list[RebuiltTensor] = []
        report = rebuild(
            below,
            leg,
            on_tensor=over.append,
            threads=threads,
            cancelled=cancelled,
            base_version=base_version,
            base_checksums=base_checksums,
        )
        below, base_checksums, base_version = _Layered(below, over), report.checksums, None
    return rebuild(
        below,
        legs[-1] if legs else [],
        on_tensor=on_tensor,
        threads=threads,
        cancelled=cancelled,
        base_version=base_version,
        base_checksums=base_checksums,
        everything=everything or len(legs) > 1,
    )


def rebuilt(
    start: CanonicalState,
    chain: Sequence[Path],
    overlays: OverlayRoot,
    name: str,
    *,
    threads: int,
    cancelled: Callable[[], bool],
    base_version: int | None,
) -> tuple[CanonicalState, int]:
    """`start` with `chain` applied; changed tensors are written to the overlay `name`.

    base_version: the version `start` is, if it is of the chain's first run.
    Returns: the new state, and payload bytes read.
    Raises: CorruptData; RebuildCancelled; OSError when the overlay cannot be written.
    """
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(PublicationReader.open(path)) for path in chain]
        source = MappedState(start)
        stack.callback(source.close)
        writer = overlays.begin(name)

        def write(tensor: RebuiltTensor) -> None:
            held = start.slices.get(tensor.name)
            if held is None or (held.dtype, held.shape) != (tensor.dtype, tensor.shape):
                raise CorruptData(
                    f"tensor {tensor.name!r} is {tensor.dtype} {list(tensor.shape)} in the "
                    "publication; the running model's differs or is absent",
                    tensor=tensor.name,
                )
            sum = tensor.checksum.to_text()
            if sum != held.checksum:
                writer.add(tensor.name, tensor.dtype, tensor.shape, tensor.data, sum)

        report = fold_legs(
            source,
            chain_legs(readers),
            on_tensor=write,
            threads=threads,
            everything=False,
            cancelled=cancelled,
            base_version=base_version,
            base_checksums=start.checksums,
        )
        missing = sorted(start.slices.keys() - report.checksums.keys())
        if missing:
            raise CorruptData(
                f"tensor {missing[0]!r} of the running model is not in the publication",
                tensor=missing[0],
            )
        slices = {**start.slices, **writer.finish()}
        return CanonicalState(slices, report.checksums, report.model_digest), report.bytes_read


def compacted(state: CanonicalState, overlays: OverlayRoot, name: str) -> CanonicalState:
    """The same state with every overlaid tensor in one fresh overlay; the others may go."""
    writer = overlays.begin(name)
    source = MappedState(state)
    try:
        for part in state.slices.values():
            if overlays.path in Path(part.path).parents:
                writer.add(part.name, part.dtype, part.shape, source.view(part.name), part.checksum)
        slices = {**state.slices, **writer.finish()}
    finally:
        source.close()
    return CanonicalState(slices, state.checksums, state.digest)


def chain_legs(readers: Sequence[PublicationReader]) -> list[list[PublicationReader]]:
    """Split a chain where it crosses to another run."""
    legs: list[list[PublicationReader]] = []
    for reader in readers:
        run = reader.manifest.ref.run_id if reader.manifest is not None else None
        before = legs[-1][-1] if legs else None
        same_run = before is not None and (
            run == (before.manifest.ref.run_id if before.manifest is not None else None)
        )
        if same_run:
            legs[-1].append(reader)
        else:
            legs.append([reader])
    return legs
