"""The rank's side of the rank channel: attempt state beside the weights (engines/base.py).

Orders are executed one at a time on one thread of their own. Staging and verification run
beside the scheduler; whatever changes live bytes or the label is executed by the scheduler
thread between two forward passes.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from stitch.checksum import Checksum, additive_lanes, lane_bytes_for
from stitch.engines.base import RankOrder, RankReply, TensorSlice
from stitch.engines.embedded.weights import LiveWeights, Mismatch
from stitch.engines.embedded.wire import label_to_wire
from stitch.errors import CorruptData, StitchError
from stitch.format.dtypes import bits_of
from stitch.types import Label

__all__ = ["LiveEngine", "Rank"]

T = TypeVar("T")
log = logging.getLogger(__name__)


class LiveEngine(Protocol):
    """What the rank needs of the scheduler."""

    @property
    def label(self) -> Label | None: ...
    @property
    def paused(self) -> bool: ...
    def call(self, work: Callable[[], T]) -> Future[T]: ...
    def weights_changing(self) -> None: ...
    def set_label(self, label: Label | None) -> None: ...


class _Refused(Exception):
    """Wrong incarnation or step; the reply's code is `refused`."""


@dataclass(slots=True)
class _Stage:
    """A staged attempt. `images` are ready to copy (via cpu); None means read at commit."""

    tensors: tuple[TensorSlice, ...]
    undo_tensors: tuple[TensorSlice, ...]
    via: str
    images: list[tuple[str, torch.Tensor]] | None


@dataclass(slots=True)
class _Attempt:
    number: int = -1
    step: str = "none"  # none, staged, committed, failed, undone, discarded
    stage: _Stage | None = None


@dataclass(slots=True)
class Rank:
    """One rank. `obey` is not reentrant: call it from one thread."""

    weights: LiveWeights
    engine: LiveEngine
    index: int = 0
    incarnation: str | None = None
    _retired: set[str] = field(default_factory=set)
    _attempt: _Attempt = field(default_factory=_Attempt)

    def obey(self, order: RankOrder) -> RankReply:
        """Execute one order. Never raises; every failure is a reply code."""
        try:
            if order.op == "state":
                return self._reply("ok", data=self._state())
            self._check_incarnation(order)
            if order.attempt < self._attempt.number:
                newest = self._attempt.number
                return self._reply("stale", f"attempt {order.attempt} is older than {newest}")
            if order.attempt > self._attempt.number:
                self._attempt = _Attempt(order.attempt)
            perform = self._orders().get(order.op)
            if perform is None:
                return self._reply("unknown_order", f"unknown order {order.op!r}")
            return self._reply("ok", data=perform(order))
        except _Refused as error:
            return self._reply("refused", str(error))
        except Mismatch as error:
            return self._reply("mismatch", error.message)
        except StitchError as error:
            return self._reply("failed", error.message)
        except Exception as error:
            log.exception("order_failed", extra={"op": order.op, "attempt": order.attempt})
            return self._reply("failed", f"{type(error).__name__}: {error}")

    def reload(self, images: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Write weights that came by another way than an attempt; whatever is staged is void.

        The engine must be paused. Raises: as writing fails; then the weights are a mix.
        """
        self._attempt.stage = None
        self._attempt.step = "discarded"
        self._change((name, lambda image=image: image) for name, image in images)

    def _orders(self) -> Mapping[str, Callable[[RankOrder], dict[str, Any]]]:
        return {
            "stage": self._stage,
            "commit": self._commit,
            "verify": self._verify,
            "undo": self._undo,
            "discard": self._discard,
            "label": self._label,
        }

    def _reply(
        self, code: str, message: str = "", data: Mapping[str, Any] | None = None
    ) -> RankReply:
        return RankReply(self.index, code, message, data or {})

    def _state(self) -> dict[str, Any]:
        return {
            "incarnation": self.incarnation,
            "attempt": self._attempt.number,
            "step": self._attempt.step,
            "label": label_to_wire(self.engine.label),
            "paused": self.engine.paused,
        }

    def _check_incarnation(self, order: RankOrder) -> None:
        if order.incarnation == self.incarnation:
            return
        if order.incarnation in self._retired:
            raise _Refused(f"incarnation {order.incarnation} was replaced by {self.incarnation}")
        if self.incarnation is None and order.op != "discard":
            raise _Refused("no incarnation drives this rank yet; it must begin with a discard")
        if order.op != "discard":
            raise _Refused(
                f"the rank belongs to incarnation {self.incarnation}; "
                f"{order.incarnation} must take it over with a discard first"
            )
        if self.incarnation is not None:
            self._retired.add(self.incarnation)
        self.incarnation = order.incarnation
        self._attempt = _Attempt()
        self._set_label(None)

    def _stage(self, order: RankOrder) -> dict[str, Any]:
        attempt = self._attempt
        if attempt.stage is not None and attempt.step != "discarded":
            same = (attempt.stage.tensors, attempt.stage.undo_tensors) == (
                order.tensors,
                order.undo_tensors,
            )
            if not same or attempt.step != "staged":
                raise _Refused(f"attempt {attempt.number} is {attempt.step} with other tensors")
            return {"staged": len(order.tensors)}
        if attempt.step != "none":
            raise _Refused(f"attempt {attempt.number} is {attempt.step}; stage a new attempt")
        self._check_slices(order)
        images = None
        if order.via == "cpu":
            images = [(t.name, self._read(t)) for t in self._distinct(order.tensors)]
        attempt.stage = _Stage(order.tensors, order.undo_tensors, order.via, images)
        attempt.step = "staged"
        return {"staged": len(order.tensors)}

    def _check_slices(self, order: RankOrder) -> None:
        """Names, dtypes, shapes, sizes and ties, before anything is kept."""
        staged = {t.name: t for t in order.tensors}
        if len(staged) != len(order.tensors):
            raise Mismatch("a tensor is named twice")
        changing = {t.name for t in self._distinct(order.tensors)}
        undo = {t.name for t in self._distinct(order.undo_tensors)}
        if order.undo_tensors and undo != changing:
            odd = min(undo ^ changing)
            raise Mismatch(f"{odd} is not in both tensors and undo_tensors", tensor=odd)
        for tensor in (*order.tensors, *order.undo_tensors):
            held = self.weights.canonical(tensor.name, tensor.dtype, tensor.shape)
            if tensor.nbytes != held.nbytes:
                raise Mismatch(f"{tensor.name} has {held.nbytes} bytes here, not {tensor.nbytes}")
            size = Path(tensor.path).stat().st_size
            if tensor.offset + tensor.nbytes > size:
                raise CorruptData(
                    f"{tensor.path} has {size} bytes; {tensor.name} would end past them"
                )
        for tensor in order.tensors:
            for twin in self.weights.twins(tensor.name):
                other = staged.get(twin)
                if other is None:
                    raise Mismatch(f"{tensor.name} is tied to {twin}, which must change with it")
                if other.checksum != tensor.checksum:
                    raise Mismatch(f"{tensor.name} and {twin} are tied but differ")

    def _distinct(self, tensors: Sequence[TensorSlice]) -> list[TensorSlice]:
        """Without declared aliases: their storage is written under its checkpoint name."""
        return [t for t in tensors if t.name not in self.weights.aliases]

    def _read(self, tensor: TensorSlice) -> torch.Tensor:
        """The tensor's bytes, checked against its checksum, as the live storage will hold them."""
        with Path(tensor.path).open("rb") as file:
            if tensor.nbytes == 0:
                return self.weights.image(tensor.name, b"")
            with (
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole,
                memoryview(whole) as view,
                view[tensor.offset : tensor.offset + tensor.nbytes] as data,
            ):
                if tensor.checksum:
                    self._check_bytes(tensor, data)
                return self.weights.image(tensor.name, data)

    @staticmethod
    def _check_bytes(tensor: TensorSlice, data: memoryview) -> None:
        lane = lane_bytes_for(tensor.shape, bits_of(tensor.dtype))
        found = additive_lanes(data, lane_bytes=lane)
        if found != Checksum.from_text(tensor.checksum):
            raise CorruptData(
                f"{tensor.path} holds other bytes for {tensor.name} than its checksum says",
                tensor=tensor.name,
            )

    def _commit(self, order: RankOrder) -> dict[str, Any]:
        attempt = self._attempt
        if attempt.step == "committed":
            return {}
        if attempt.step != "staged" or attempt.stage is None:
            raise _Refused(f"attempt {attempt.number} is {attempt.step}; only a stage commits")
        self._require_pause()
        stage = attempt.stage
        images = stage.images
        attempt.step = "failed"  # until all bytes are there
        if images is None:
            # The engine's own loader: files are read inside the pause, one tensor at a time.
            self._change((t.name, lambda t=t: self._read(t)) for t in self._distinct(stage.tensors))
        else:
            self._change((name, lambda image=image: image) for name, image in images)
        attempt.step = "committed"
        stage.images = None
        return {"committed": len(stage.tensors)}

    def _undo(self, order: RankOrder) -> dict[str, Any]:
        attempt = self._attempt
        if attempt.step in ("undone", "staged"):
            attempt.step = "undone"
            if attempt.stage is not None:
                attempt.stage.images = None
            return {}
        if attempt.step not in ("committed", "failed") or attempt.stage is None:
            raise _Refused(f"attempt {attempt.number} is {attempt.step}; there is nothing to undo")
        if not attempt.stage.undo_tensors and attempt.stage.tensors:
            raise _Refused(f"attempt {attempt.number} was staged without undo tensors")
        self._require_pause()
        attempt.step = "failed"
        self._change(
            (t.name, lambda t=t: self._read(t)) for t in self._distinct(attempt.stage.undo_tensors)
        )
        attempt.step = "undone"
        return {"undone": len(attempt.stage.undo_tensors)}

    def _require_pause(self) -> None:
        if not self.engine.paused:
            raise _Refused("the engine is not paused; pause before changing weights")

    def _change(self, images: Any) -> None:
        def change() -> None:
            self._require_pause()
            self.engine.weights_changing()
            for name, image in images:
                self.weights.write([(name, image())])

        self.engine.call(change).result()

    def _verify(self, order: RankOrder) -> dict[str, Any]:
        names = None
        if order.scope == "changed":
            if self._attempt.stage is None:
                raise _Refused(f"attempt {order.attempt} staged nothing to verify")
            names = [t.name for t in self._attempt.stage.tensors]
        sums = self.weights.checksums(names)
        return {"checksums": {name: checksum.to_text() for name, checksum in sums.items()}}

    def _discard(self, order: RankOrder) -> dict[str, Any]:
        if self._attempt.step in ("none", "staged", "undone"):
            self._attempt.step = "discarded"
        self._attempt.stage = None
        return {}

    def _label(self, order: RankOrder) -> dict[str, Any]:
        self._set_label(order.label)
        return {}

    def _set_label(self, label: Label | None) -> None:
        self.engine.call(lambda: self.engine.set_label(label)).result()
