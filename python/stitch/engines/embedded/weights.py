"""Live weights by canonical name: exact widening in, exact narrowing out.

Weights are bits. bf16 is widened by shifting integers, so NaN payloads survive; on the way
out the bits that widening added must still be zero, or the tensor is reported as corrupt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from stitch.checksum import Checksum, additive_lanes, lane_bytes_for
from stitch.errors import CorruptData, InvalidInput, Unsupported
from stitch.format.checkpoint import Checkpoint
from stitch.format.dtypes import bits_of

__all__ = ["CanonicalTensor", "LiveWeights", "Mismatch", "widen"]

Buffer = bytes | bytearray | memoryview
Array = np.ndarray[Any, Any]

_STORABLE: Final = {
    torch.float32: frozenset({"F32", "BF16", "F16"}),
    torch.bfloat16: frozenset({"BF16"}),
}


class Mismatch(InvalidInput):
    """A tensor does not fit the live storages; nothing was changed."""


@dataclass(frozen=True, slots=True)
class CanonicalTensor:
    """One checkpoint tensor: name, safetensors dtype, shape, size in bytes as stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class LiveWeights:
    """The model's storages under their checkpoint names.

    `write` belongs to the thread that runs forward passes; reading (`checksum`) may run beside
    it on another thread while nothing writes.

    tensors: the checkpoint's tensors. aliases: further names the architecture ties to one of
    them; they may be sent along and need not be.
    """

    def __init__(self, model: torch.nn.Module, checkpoint: Checkpoint, architecture: str) -> None:
        storages = _storages(model)
        unknown = sorted(set(checkpoint.tensors) - set(storages))
        if unknown:
            raise Unsupported(
                f"{checkpoint.directory} has tensor {unknown[0]}, which {architecture} does not; "
                "serve it with another engine or remove the tensor"
            )
        self.tensors = {
            name: CanonicalTensor(name, stored.dtype, tuple(stored.shape), stored.nbytes)
            for name, stored in checkpoint.tensors.items()
        }
        self._live = storages
        by_storage: dict[int, list[str]] = {}
        for name, live in storages.items():
            by_storage.setdefault(live.data_ptr(), []).append(name)
        self._twins = {name: names for names in by_storage.values() for name in names}
        self.aliases: dict[str, str] = {}
        for name in storages:
            if name in self.tensors:
                continue
            twin = next((n for n in self._twins[name] if n in self.tensors), None)
            if twin is None:
                raise InvalidInput(
                    f"{checkpoint.directory} lacks tensor {name} of {architecture}; "
                    "the checkpoint is incomplete"
                )
            self.aliases[name] = twin
        self._load(checkpoint)

    def _load(self, checkpoint: Checkpoint) -> None:
        for name in self.tensors:
            tensor = self.canonical(name, self.tensors[name].dtype, self.tensors[name].shape)
            data = checkpoint.read(name)
            first = next(n for n in self._twins[name] if n in self.tensors)
            if first != name and checkpoint.read(first) != data:
                raise InvalidInput(
                    f"{checkpoint.directory}: {name} and {first} are tied but their bytes differ"
                )
            self.write([(name, widen(data, tensor.dtype, self._live[name].dtype))])

    def canonical(self, name: str, dtype: str, shape: Iterable[int]) -> CanonicalTensor:
        """The held tensor of that name, if dtype and shape agree. Raises: Mismatch."""
        held = self.tensors.get(self.aliases.get(name, name))
        if held is None:
            raise Mismatch(f"the model has no tensor {name}", tensor=name)
        if held.dtype != dtype:
            raise Mismatch(f"{name} is {held.dtype} here, not {dtype}", tensor=name)
        if held.shape != tuple(shape):
            raise Mismatch(f"{name} is {list(held.shape)} here, not {list(shape)}", tensor=name)
        live = self._live[name]
        if tuple(live.shape) != held.shape:
            raise Mismatch(
                f"{name} is {list(held.shape)} in the checkpoint and {list(live.shape)} in the "
                "model; config.json belongs to another checkpoint",
                tensor=name,
            )
        if dtype not in _STORABLE[live.dtype]:
            raise Mismatch(
                f"{name}: {dtype} is not exact in the compute dtype {live.dtype}; "
                "use --compute-dtype float32 and a floating point checkpoint",
                tensor=name,
            )
        return held

    def twins(self, name: str) -> list[str]:
        """Checkpoint names that share the storage of `name`, itself included."""
        return [n for n in self._twins[name] if n in self.tensors]

    def image(self, name: str, data: Buffer) -> torch.Tensor:
        """`data` (canonical bytes) as the live storage will hold it, ready to copy."""
        held = self.tensors[self.aliases.get(name, name)]
        return widen(data, held.dtype, self._live[name].dtype)

    def write(self, images: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy images into the live storages. Not atomic: a failure leaves a mix."""
        with torch.no_grad():
            for name, image in images:
                self._live[name].view(-1).copy_(image)

    def checksums(
        self, names: Iterable[str] | None = None, *, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, Checksum]:
        """Additive checksums of the live bytes, narrowed exactly to the canonical dtype.

        Raises: CorruptData for bits that no canonical value widens to.
        """
        sums = {}
        for name in self.tensors if names is None else names:
            if stop():
                break
            held = self.tensors[self.aliases.get(name, name)]
            lane = lane_bytes_for(held.shape, bits_of(held.dtype))
            data = _narrow(name, self._live[name], held.dtype)
            sums[name] = additive_lanes(data.view(np.uint8).data, lane_bytes=lane)
        return sums


def widen(data: Buffer, dtype: str, compute: torch.dtype) -> torch.Tensor:
    """Canonical bytes to a flat tensor of the compute dtype, exactly. Copies.

    float16 goes through the hardware's conversion, which makes signalling NaNs quiet.
    """
    if compute == torch.bfloat16:
        return torch.from_numpy(np.frombuffer(data, "<i2").copy()).view(torch.bfloat16)
    if dtype == "BF16":
        bits = np.frombuffer(data, "<u2").astype(np.uint32)
        bits <<= np.uint32(16)
        return torch.from_numpy(bits.view(np.float32))
    if dtype == "F16":
        return torch.from_numpy(np.frombuffer(data, "<f2").astype(np.float32))
    return torch.from_numpy(np.frombuffer(data, "<f4").copy())


def _narrow(name: str, live: torch.Tensor, dtype: str) -> Array:
    flat = live.detach().reshape(-1)
    if flat.dtype == torch.bfloat16:
        stored: Array = np.ascontiguousarray(flat.view(torch.int16).numpy())
        return stored
    values: Array = flat.numpy()
    if dtype == "F32":
        return values
    if dtype == "F16":
        narrow: Array = values.astype(np.float16)
        if not np.array_equal(narrow.astype(np.float32).view(np.uint32), values.view(np.uint32)):
            raise CorruptData(f"live {name} holds values that float16 cannot", tensor=name)
        return narrow
    halves = values.view(np.uint16).reshape(-1, 2)
    if halves[:, 0].any():
        raise CorruptData(f"live {name} holds values that bfloat16 cannot", tensor=name)
    return np.ascontiguousarray(halves[:, 1])


def _storages(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """Parameters and persistent buffers by name, tied names included."""
    kept = model.state_dict(keep_vars=True)
    return {name: tensor.detach() for name, tensor in kept.items()}
