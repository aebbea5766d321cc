"""Rebuilding the state of a version from base and chain, through forks, for the publisher."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stitch.checksum import Checksum, additive_lanes, lane_bytes_for, model_digest
from stitch.env import Env
from stitch.errors import CorruptData, InvalidInput, NotVisibleYet, Unavailable
from stitch.format.checkpoint import Checkpoint
from stitch.format.dtypes import bits_of
from stitch.format.publication import PublicationReader
from stitch.format.rebuild import RebuiltTensor, TensorSource, rebuild
from stitch.format.wire import FILE_NAME, RunRecord
from stitch.publisher.state import SealedState, TensorFacts, TensorState
from stitch.stores.base import Store
from stitch.stores.versions import chain_for, fetch_version, record_of
from stitch.types import Kind, Ref

__all__ = ["Loader"]

log = logging.getLogger(__name__)

_FORKS_MAX: Final = 64
_SIDE_FILE_BYTES_MAX: Final = 64 * 2**20


@dataclass(frozen=True)
class Loader:
    """Loads states of one root. `base` is the checkpoint of the first run's boot version.

    Nothing that is loaded keeps a file open or mapped. With `copy_base` False the base's tensors
    stay in its files and are read and checked whenever they are needed: ranks of one host would
    hold a copy of the model each, and a rank needs only the tensors that it gives.
    """

    store: Store
    base: Path | None
    cache_dir: Path
    env: Env
    threads: int
    copy_base: bool = True

    async def load(
        self, record: RunRecord, version: int, *, forks_left: int = _FORKS_MAX
    ) -> SealedState:
        """The verified state of one version of a run.

        Raises: NotVisibleYet, CorruptData if the chain is broken, or leads to a base that was not
            given; InvalidInput if `base` is not what the run booted from.
        """
        ref = Ref(record.run_id, version)
        chain = await chain_for(self.store, record, version)
        paths = [
            await fetch_version(self.store, record, number, self.cache_dir, self.env)
            for number in chain
        ]
        below: SealedState | None = None
        with ExitStack() as stack:
            readers = [
                stack.enter_context(
                    await self.env.offload(
                        lambda path=path, number=number: PublicationReader.open(  # type: ignore[misc]
                            path, expect=Ref(record.run_id, number), verify_files=False
                        )
                    )
                )
                for path, number in zip(paths, chain, strict=True)
            ]
            if not readers or readers[0].kind is not Kind.ANCHOR:
                below = await self._boot_state(record, forks_left)
            state = await self.env.offload(lambda: self._fold(ref, below, readers))
        claimed = record.base_digest
        if claimed is not None and not chain and state.model_digest != claimed:
            raise InvalidInput(
                f"the base is not the checkpoint that run {record.run_id} booted from "
                f"(model digest {state.model_digest}, the run says {claimed})",
                param="base",
            )
        return state

    async def _boot_state(self, record: RunRecord, forks_left: int) -> SealedState:
        """What the run's boot version holds: the base, or the state it was forked from."""
        if record.forked_from is not None:
            parent = await record_of(self.store, record.forked_from.run_id)
            if forks_left == 0:
                raise CorruptData(f"run {record.run_id} has over {_FORKS_MAX} forks behind it")
            version = record.forked_from.version
            return await self.load(parent, version, forks_left=forks_left - 1)
        if self.base is None:
            raise NotVisibleYet(
                f"run {record.run_id} needs its base checkpoint: pass base=, or publish an anchor"
            )
        return await self.base_state(Ref(record.run_id, record.boot_version))

    async def base_state(self, ref: Ref) -> SealedState:
        """The base checkpoint's state, counted as `ref`. Raises: InvalidInput, CorruptData."""
        base = self.base
        assert base is not None

        def work() -> SealedState:
            with Checkpoint.open(base) as checkpoint:
                return self._from_checkpoint(ref, checkpoint)

        return await self.env.offload(work)

    def _from_checkpoint(self, ref: Ref, checkpoint: Checkpoint) -> SealedState:
        names = list(checkpoint.tensors)
        with ThreadPoolExecutor(self.threads, thread_name_prefix="stitch-base") as pool:
            states = pool.map(lambda name: self._base_tensor(checkpoint, name), names)
            held = dict(zip(names, states, strict=True))
        return _state(ref, held, None, side_files=_side_files(checkpoint))

    def _base_tensor(self, checkpoint: Checkpoint, name: str) -> TensorState:
        """Its checksum is of the bytes that are kept, or that every later read must give."""
        tensor = checkpoint.tensors[name]
        shape = tuple(tensor.shape)
        lane = lane_bytes_for(shape, bits_of(tensor.dtype))
        if self.copy_base:
            data = checkpoint.read(name).toreadonly()
            checksum = additive_lanes(data, lane_bytes=lane)
            return TensorState(name, tensor.dtype, shape, data, checksum)
        checksum = checkpoint.checksums(names=[name])[name]

        def read() -> memoryview:
            found = checkpoint.read(name).toreadonly()
            if additive_lanes(found, lane_bytes=lane) != checksum:
                raise Unavailable(
                    f"{checkpoint.directory}: tensor {name!r} changed while the publisher used it; "
                    "restart the job with the base that it booted from",
                    tensor=name,
                )
            return found

        return TensorState(name, tensor.dtype, shape, read, checksum)

    def _fold(
        self, ref: Ref, below: SealedState | None, readers: Sequence[PublicationReader]
    ) -> SealedState:
        if not readers:
            assert below is not None
            return SealedState(
                ref,
                below.held,
                below.catalog,
                below.model_digest,
                below.manifest_digest,
                below.deltas_since_anchor,
                below.side_files,
            )
        source: TensorSource = below if below is not None else _state(ref, {}, None)
        known: dict[str, Checksum] | None = None
        if below is not None:
            known = {name: state.checksum for name, state in below.tensors.items()}
        held = dict(below.tensors) if below is not None else {}

        def keep(tensor: RebuiltTensor) -> None:
            held[tensor.name] = TensorState(
                tensor.name, tensor.dtype, tensor.shape, tensor.data, tensor.checksum
            )

        rebuild(
            source,
            readers,
            on_tensor=keep,
            threads=self.threads,
            base_checksums=known,
            everything=below is None,
        )
        anchor = readers[0].checkpoint
        side_files = _side_files(anchor) if anchor else below.side_files if below else None
        since = (
            len(readers) - 1
            if anchor
            else len(readers) + (below.deltas_since_anchor if below else 0)
        )
        return _state(ref, held, readers[-1].manifest_digest, since=since, side_files=side_files)


def _state(
    ref: Ref,
    held: dict[str, TensorState],
    manifest_digest: str | None,
    *,
    since: int = 0,
    side_files: Mapping[str, bytes] | None = None,
) -> SealedState:
    catalog: dict[str, TensorFacts] = {name: state.facts for name, state in held.items()}
    digest = model_digest(facts.term(name) for name, facts in catalog.items())
    return SealedState(ref, held, catalog, digest, manifest_digest, since, side_files)


def _side_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    size = 0
    for path in checkpoint.side_files:
        if not re.fullmatch(FILE_NAME, path.name):
            log.warning("left out of anchors: no manifest can name it", extra={"file": path.name})
            continue
        size += path.stat().st_size
        if size > _SIDE_FILE_BYTES_MAX:
            raise InvalidInput(
                f"{checkpoint.directory} holds over {_SIDE_FILE_BYTES_MAX} bytes of files that are "
                "no weights; keep only config and tokenizer files beside a checkpoint",
                file=str(path),
            )
        found[path.name] = path.read_bytes()
    return found
