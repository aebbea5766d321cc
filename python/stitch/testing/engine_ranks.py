"""A simulated rank: live weights in memory, attempt state beside them, the order rules kept.

The rules are those of `engines.base.RankOrder`; `testing.engine_suite` holds every engine to
them. Broken variants in the tests override one method each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from stitch.checksum import Checksum, additive_lanes, lane_bytes_for, model_digest, tensor_term
from stitch.engines.base import RankOrder, RankReply, TensorSlice
from stitch.format.checkpoint import Checkpoint
from stitch.format.dtypes import bits_of
from stitch.format.mapping import MappedFile
from stitch.types import Label

__all__ = ["SimulatedRank"]

# Called before each tensor that is copied, with the count copied so far; may raise _Stop.
Step = Callable[[int], Awaitable[None]]


class SimulatedRank:
    """One rank holding a full copy of the model.

    Args:
        index: the rank's number.
        model_dir: the checkpoint to load.
    """

    def __init__(self, index: int, model_dir: Path) -> None:
        self.index = index
        self.info: dict[str, tuple[str, tuple[int, ...], int]] = {}
        self.live: dict[str, bytearray] = {}
        with Checkpoint.open(model_dir) as checkpoint:
            for name, tensor in checkpoint.tensors.items():
                self.info[name] = (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
                self.live[name] = bytearray(checkpoint.view(name))
        self.incarnation: str | None = None
        self.retired: set[str] = set()
        self.attempt = 0
        self.step = "none"
        self.failed = False
        self.label: Label | None = None
        self.staged: dict[str, bytes] = {}
        self.undo: dict[str, TensorSlice] = {}
        self._sums: dict[str, str] = {}
        self._fingerprint: str | None = None

    async def apply(self, order: RankOrder, before_tensor: Step) -> RankReply:
        """Carry out one order. Orders of one rank never overlap."""
        refused = self._enter(order)
        if refused is not None:
            return refused
        if order.op == "stage":
            return self.on_stage(order)
        if order.op == "commit":
            return await self.on_commit(before_tensor)
        if order.op == "undo":
            return await self.on_undo(before_tensor)
        if order.op == "verify":
            return self.on_verify(order)
        if order.op == "discard":
            return self.on_discard()
        if order.op == "label":
            self.label = order.label
            return self._ok()
        if order.op == "state":
            return self._ok(
                attempt=self.attempt,
                step="failed" if self.failed else self.step,
                label=None if self.label is None else self.label.to_wire(),
            )
        return self._reply("unknown_order", f"no order {order.op!r}")

    def _enter(self, order: RankOrder) -> RankReply | None:
        """Incarnation and attempt rules; None if the order may go on."""
        if order.incarnation != self.incarnation:
            if order.op == "state":
                return None
            if order.op != "discard" or order.incarnation in self.retired:
                return self._reply("refused", "another incarnation, or none yet, drives this rank")
            if self.incarnation is not None:
                self.retired.add(self.incarnation)
            self.incarnation = order.incarnation
            self.attempt, self.label = 0, None
            self.forget()
        if order.attempt < self.attempt:
            return self._reply("stale", f"attempt {self.attempt} is newer")
        if order.attempt > self.attempt:
            self.attempt = order.attempt
            self.forget()
        return None

    def forget(self) -> None:
        """Drop the stage; live weights stay."""
        self.step, self.failed = "none", False
        self.staged, self.undo = {}, {}

    def on_stage(self, order: RankOrder) -> RankReply:
        if self.step == "staged":
            return self._ok()
        if self.step != "none":
            return self._reply("refused", f"attempt {self.attempt} is at {self.step}")
        if [t.name for t in order.tensors] != [t.name for t in order.undo_tensors]:
            return self._reply("mismatch", "staged and undo tensors differ in names")
        for part in (*order.tensors, *order.undo_tensors):
            if self.info.get(part.name) != (part.dtype, part.shape, part.nbytes):
                return self._reply("mismatch", f"{part.name}: not such a live storage")
        try:
            self.staged = {part.name: _read(part) for part in order.tensors}
        except OSError as error:
            return self._reply("failed", f"{error.filename}: {error.strerror or error}")
        self.undo = {part.name: part for part in order.undo_tensors}
        self.step = "staged"
        return self._ok()

    async def on_commit(self, before_tensor: Step) -> RankReply:
        if self.step == "committed":
            return self._reply("failed", "an earlier try failed") if self.failed else self._ok()
        if self.step != "staged":
            return self._reply("refused", f"attempt {self.attempt} is at {self.step}")
        self.step, self.label = "committed", None
        try:
            await self.copy(self.staged, before_tensor)
        except RuntimeError as error:
            self.failed = True
            return self._reply("failed", str(error))
        return self._ok()

    async def on_undo(self, before_tensor: Step) -> RankReply:
        if self.step == "undone":
            return self._reply("failed", "an earlier try failed") if self.failed else self._ok()
        if self.step not in {"committed", "staged"}:
            return self._reply("refused", f"attempt {self.attempt} is at {self.step}")
        self.step, self.label, self.failed = "undone", None, False
        try:
            await self.copy({n: _read(part) for n, part in self.undo.items()}, before_tensor)
        except (RuntimeError, OSError) as error:
            self.failed = True
            return self._reply("failed", str(error))
        return self._ok()

    def on_verify(self, order: RankOrder) -> RankReply:
        if order.scope == "full":
            return self._ok(checksums=self.sums(self.live))
        if self.step not in {"staged", "committed", "undone"}:
            return self._reply("refused", "nothing is staged in this attempt")
        return self._ok(checksums=self.sums(self.staged))

    def on_discard(self) -> RankReply:
        self.forget()
        self.step = "discarded"
        return self._ok()

    async def copy(self, tensors: Mapping[str, bytes], before_tensor: Step) -> None:
        """Write live storages one by one."""
        for count, name in enumerate(tensors):
            await before_tensor(count)
            self.write(name, tensors[name])

    def write(self, name: str, data: bytes) -> None:
        """Overwrite one live storage."""
        self.live[name][:] = data
        self._sums.pop(name, None)
        self._fingerprint = None

    def sums(self, names: Mapping[str, object]) -> dict[str, str]:
        """Checksums of live bytes, in the additive checksum's text form."""
        return {name: self.sum_of(name) for name in names}

    def sum_of(self, name: str) -> str:
        """One live storage's checksum, from its bytes; computed once per write."""
        found = self._sums.get(name)
        if found is None:
            dtype, shape, _ = self.info[name]
            lane = lane_bytes_for(shape, bits_of(dtype))
            found = self._sums[name] = additive_lanes(self.live[name], lane_bytes=lane).to_text()
        return found

    def fingerprint(self) -> str:
        """Model digest of the live bytes: what sampled tokens are marked with."""
        if self._fingerprint is None:
            self._fingerprint = model_digest(
                tensor_term(name, dtype, shape, Checksum.from_text(self.sum_of(name)))
                for name, (dtype, shape, _) in self.info.items()
            )
        return self._fingerprint

    def _ok(self, **data: object) -> RankReply:
        return RankReply(self.index, "ok", data=data)

    def _reply(self, code: str, message: str) -> RankReply:
        return RankReply(self.index, code, message)


def _read(part: TensorSlice) -> bytes:
    mapped = MappedFile(Path(part.path))
    try:
        return bytes(mapped.view(part.offset, part.nbytes))
    finally:
        mapped.close()
