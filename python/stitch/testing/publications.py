"""A small writer of publications for tests: deterministic, on the caller's loop, over any store.

It writes what the publisher writes, but lets a test do what a publisher never would: leave
files out, damage bytes, move the pointer early or back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stitch import delta
from stitch.checksum import (
    Checksum,
    additive_lanes,
    blake3,
    digest,
    lane_bytes_for,
    model_digest,
    tensor_term,
)
from stitch.env import Env
from stitch.format.checkpoint import Checkpoint
from stitch.format.dtypes import bits_of
from stitch.format.records import (
    encode_run_record,
    new_run_record,
    run_record_key,
    version_prefix,
)
from stitch.format.tensors import RawTensor
from stitch.format.wire import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    FileEntry,
    ForkPoint,
    FormatVersion,
    Manifest,
    RefModel,
    RunRecord,
    TensorEntry,
    to_json_bytes,
)
from stitch.format.write import (
    DataFile,
    EncodedTensor,
    anchor_file,
    data_file_name,
    delta_file,
    encode_index,
    manifest_name,
)
from stitch.stores.base import Store
from stitch.types import Kind, Ref

__all__ = ["ScriptedRun", "checkpoint_tensors", "small_model", "write_checkpoint"]

_CHECKSUM_FORMAT: Final = "xxh3-128"


def checkpoint_tensors(directory: Path) -> dict[str, RawTensor]:
    """All tensors of a checkpoint, copied into memory."""
    with Checkpoint.open(directory) as checkpoint:
        return {
            name: RawTensor(name, t.dtype, tuple(t.shape), bytes(checkpoint.view(name)))
            for name, t in checkpoint.tensors.items()
        }


def small_model(*, tensor_count: int = 4, seed: int = 0) -> dict[str, RawTensor]:
    """A few small tensors of several dtypes and shapes, bytes from `seed`."""
    kinds = (("BF16", (8, 6), 96), ("F32", (5,), 20), ("F8_E4M3", (4, 3), 12), ("BF16", (1,), 2))
    found = {}
    for index in range(tensor_count):
        dtype, shape, nbytes = kinds[index % len(kinds)]
        name = f"layers.{index}.weight"
        data = bytes((37 * index + 11 * at + 101 * seed) % 251 for at in range(nbytes))
        found[name] = RawTensor(name, dtype, shape, data)
    return found


def write_checkpoint(directory: Path, tensors: Mapping[str, RawTensor]) -> Path:
    """Write a checkpoint of one file; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    file = anchor_file("model.safetensors", list(tensors.values()))
    (directory / file.name).write_bytes(b"".join(bytes(chunk) for chunk in file.chunks))
    return directory


@dataclass(slots=True)
class ScriptedRun:
    """One run and the state of its newest sealed version. `digests`: model digest of each ref."""

    store: Store
    env: Env
    record: RunRecord
    tensors: dict[str, RawTensor]
    version: int
    manifest_digest: str | None = None
    digests: dict[Ref, str] = field(default_factory=dict)

    @classmethod
    async def claim(
        cls,
        store: Store,
        env: Env,
        run_id: str,
        tensors: Mapping[str, RawTensor],
        *,
        first: bool = True,
        boot_version: int = 0,
        forked_from: ForkPoint | None = None,
        declare_base: bool = True,
        point: bool = True,
    ) -> ScriptedRun:
        """Write the run's record and, with `point`, the pointer to its boot version."""
        base = _model_digest(tensors)
        record = new_run_record(
            run_id,
            first=first,
            boot_version=boot_version,
            base_digest=base if declare_base else None,
            writer=env.random.nonce(),
            forked_from=forked_from,
        )
        await store.create(run_record_key(run_id), encode_run_record(record))
        run = cls(store, env, record, dict(tensors), boot_version)
        run.digests[run.ref] = base
        if point:
            await run.point()
        return run

    @property
    def ref(self) -> Ref:
        """The newest sealed version."""
        return Ref(self.record.run_id, self.version)

    async def point(self, text: str | None = None) -> None:
        """Set the pointer, whatever it is now; `text` for one that no publisher writes."""
        found = await self.store.read_pointer()
        await self.store.swap_pointer(found.token, str(self.ref) if text is None else text)

    async def publish(
        self,
        changed: Mapping[str, bytes] | None = None,
        *,
        kind: Kind = Kind.DELTA,
        encoding: str = "xor",
        point: bool = True,
        damage: bool = False,
    ) -> Ref:
        """Seal the next version, with `changed` tensors' new bytes, and point to it.

        damage: one payload byte differs from what every digest says, in a version that is
        consistent otherwise; the run itself goes on from the right bytes.
        """
        new = dict(self.tensors)
        for name, data in (changed or {}).items():
            new[name] = RawTensor(name, new[name].dtype, new[name].shape, data)
        ref = Ref(self.record.run_id, self.version + 1)
        attempt = self.env.random.nonce()
        file = self._delta(attempt, new, encoding) if kind is Kind.DELTA else None
        if kind is Kind.ANCHOR:
            file = anchor_file(data_file_name(attempt, 0, 1, kind), list(new.values()))
        if file is not None and damage:
            file = _damaged(file)
        manifest = to_json_bytes(self._manifest(ref, kind, attempt, new, file, encoding))
        index = encode_index(
            ref=ref,
            kind=kind,
            base_version=self.version if kind is Kind.DELTA else None,
            encoding=encoding if kind is Kind.DELTA else None,
            checksum_format=_CHECKSUM_FORMAT if kind is Kind.DELTA else None,
            weight_map=self._weight_map(kind, new, file),
            total_size=None if kind is Kind.DELTA else sum(t.nbytes for t in new.values()),
            manifest_name=manifest_name(attempt),
            manifest_blake3=blake3(manifest),
        )
        staging = await self.store.begin(version_prefix(self.record, ref.version), attempt=attempt)
        if file is not None:
            await staging.put(file.name, file.chunks)
        await staging.put(manifest_name(attempt), [manifest])
        await staging.seal(index)
        self.tensors, self.version = new, ref.version
        self.manifest_digest = blake3(manifest)
        self.digests[ref] = _model_digest(new)
        if point:
            await self.point()
        return ref

    def fork_point(self) -> ForkPoint:
        """The newest version, as another run's record names where it forked."""
        return ForkPoint(
            run_id=self.record.run_id, version=self.version, manifest_digest=self.manifest_digest
        )

    def _delta(self, attempt: str, new: Mapping[str, RawTensor], encoding: str) -> DataFile | None:
        encoded = []
        for name, tensor in new.items():
            blob = delta.encode(self.tensors[name].data, tensor.data, encoding=encoding)
            if blob is not None:
                sum = digest(_CHECKSUM_FORMAT, tensor.data)
                encoded.append(EncodedTensor(name, tensor.dtype, tensor.shape, blob, sum))
        if not encoded:
            return None
        return delta_file(data_file_name(attempt, 0, 1, Kind.DELTA), encoded)

    def _changed(self, new: Mapping[str, RawTensor]) -> list[str]:
        return [name for name in new if bytes(new[name].data) != bytes(self.tensors[name].data)]

    def _weight_map(
        self, kind: Kind, new: Mapping[str, RawTensor], file: DataFile | None
    ) -> dict[str, str]:
        if file is None:
            return {}
        return dict.fromkeys(new if kind is Kind.ANCHOR else self._changed(new), file.name)

    def _manifest(
        self,
        ref: Ref,
        kind: Kind,
        attempt: str,
        new: Mapping[str, RawTensor],
        file: DataFile | None,
        encoding: str,
    ) -> Manifest:
        delta_kind = kind is Kind.DELTA
        names = self._changed(new) if delta_kind else list(new)
        return Manifest(
            format=FormatVersion(major=FORMAT_MAJOR, minor=FORMAT_MINOR),
            ref=RefModel.of(ref),
            kind=kind.value,
            attempt=attempt,
            base=RefModel.of(self.ref) if delta_kind else None,
            base_digest=_model_digest(self.tensors) if delta_kind else None,
            target_digest=_model_digest(new),
            parent=self.manifest_digest,
            encoding=encoding if delta_kind else None,  # type: ignore[arg-type]
            checksum_format=_CHECKSUM_FORMAT if delta_kind else None,
            files=[] if file is None else [_entry(file)],
            tensors={
                name: TensorEntry(
                    dtype=new[name].dtype,
                    shape=list(new[name].shape),
                    checksum=_checksum(new[name]).to_text(),
                )
                for name in sorted(names)
            },
        )


def _entry(file: DataFile) -> FileEntry:
    return FileEntry(name=file.name, size=file.size, blake3=file.blake3)


def _damaged(file: DataFile) -> DataFile:
    """The same file with its last byte flipped, and a BLAKE3 that agrees with that."""
    data = bytearray(b"".join(bytes(chunk) for chunk in file.chunks))
    data[-1] ^= 0xFF
    return DataFile(file.name, file.size, blake3(bytes(data)), [bytes(data)])


def _checksum(tensor: RawTensor) -> Checksum:
    lane = lane_bytes_for(tensor.shape, bits_of(tensor.dtype))
    return additive_lanes(tensor.data, lane_bytes=lane)


def _model_digest(tensors: Mapping[str, RawTensor]) -> str:
    return model_digest(
        tensor_term(name, tensor.dtype, tensor.shape, _checksum(tensor))
        for name, tensor in tensors.items()
    )
