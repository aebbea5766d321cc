"""Tensors as raw bytes: what a trainer hands over, seen as contiguous little-endian memory.

torch is never imported here: a torch tensor in the input proves that its module is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from stitch.errors import CorruptData, InvalidInput
from stitch.format.dtypes import DTYPE_BITS, nbytes_of

__all__ = ["RawTensor", "as_raw_tensors", "check_tensor_name"]

Buffer = bytes | bytearray | memoryview

NAME_BYTES_MAX: Final = 4096
# Element names as numpy and torch spell them (torch's without the `torch.` prefix).
_SAFETENSORS_NAMES: Final = MappingProxyType(
    {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "float8_e5m2": "F8_E5M2",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e8m0fnu": "F8_E8M0",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "int16": "I16",
        "uint16": "U16",
        "float16": "F16",
        "bfloat16": "BF16",
        "int32": "I32",
        "uint32": "U32",
        "float32": "F32",
        "int64": "I64",
        "uint64": "U64",
        "float64": "F64",
        "complex64": "C64",
    }
)


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor as bytes. `data` is contiguous, row-major, little-endian; not copied.

    `dtype` is the safetensors name and `shape` counts elements; together they fix `len(data)`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes."""
        return memoryview(self.data).nbytes


def as_raw_tensors(tensors: Mapping[str, Any]) -> list[RawTensor]:
    """View every tensor as bytes, sorted by name.

    Args: tensors: name -> torch.Tensor, numpy.ndarray or RawTensor. A contiguous CPU tensor is
        viewed, not copied, so the caller must not write to it while the result is read; others
        are copied to contiguous host memory.
    Raises: InvalidInput naming the tensor for anything else: an unknown dtype, a foreign byte
        order, a tensor without bytes (meta, sparse, quantized, distributed), a bad name, or a
        RawTensor whose dtype and shape do not give its length.
    """
    if not isinstance(tensors, Mapping):
        raise InvalidInput(
            f"tensors are a {type(tensors).__name__}; give a mapping from name to tensor",
            param="tensors",
        )
    for name in tensors:
        check_tensor_name(name)
    found = []
    for name in sorted(tensors):
        value = tensors[name]
        if isinstance(value, RawTensor):
            raw = value
        elif isinstance(value, np.ndarray):
            raw = _from_numpy(name, value)
        elif _is_torch(value):
            raw = _from_torch(name, value)
        else:
            raise InvalidInput(
                f"tensor {name!r} is a {type(value).__name__}; "
                "give a torch.Tensor, a numpy.ndarray or a RawTensor",
                tensor=name,
            )
        found.append(_checked(name, raw))
    return found


def check_tensor_name(name: object) -> None:
    """Refuse names that a safetensors header cannot carry. Raises: InvalidInput."""
    if not isinstance(name, str) or not name or name == "__metadata__":
        raise InvalidInput(f"{name!r} cannot name a tensor", tensor=str(name)[:200])
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidInput(
            f"tensor name {name!r} is not valid Unicode", tensor=ascii(name)
        ) from None
    if size > NAME_BYTES_MAX or "\0" in name:
        raise InvalidInput(
            f"tensor name {name[:80]!r}… is too long or holds a NUL", tensor=name[:200]
        )


def _checked(name: str, raw: RawTensor) -> RawTensor:
    if raw.name != name:
        raise InvalidInput(f"tensor {raw.name!r} is given under the name {name!r}", tensor=name)
    if raw.dtype not in DTYPE_BITS:
        raise InvalidInput(f"tensor {name!r} has unknown dtype {raw.dtype!r}", tensor=name)
    if any(extent < 0 for extent in raw.shape):
        raise InvalidInput(f"tensor {name!r} has a negative extent in its shape", tensor=name)
    view = memoryview(raw.data)
    try:
        needed = nbytes_of(raw.dtype, raw.shape)
    except CorruptData as error:
        raise InvalidInput(f"tensor {name!r}: {error.message}", tensor=name) from error
    if not view.c_contiguous or view.nbytes != needed:
        raise InvalidInput(
            f"tensor {name!r}: {raw.dtype} of shape {list(raw.shape)} needs "
            f"{needed} contiguous bytes, found {view.nbytes}",
            tensor=name,
        )
    return raw


def _bytes_view(array: np.ndarray[Any, Any]) -> Buffer:
    # memoryview.cast refuses zero extents, so an empty tensor is an empty bytes object.
    return array.data.cast("B") if array.size else b""


def _from_numpy(name: str, array: np.ndarray[Any, Any]) -> RawTensor:
    dtype = _SAFETENSORS_NAMES.get(array.dtype.name)
    if dtype is None or array.dtype.hasobject:
        raise InvalidInput(f"tensor {name!r} has unknown numpy dtype {array.dtype}", tensor=name)
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder != "little"):
        raise InvalidInput(f"tensor {name!r} is big-endian; give little-endian bytes", tensor=name)
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return RawTensor(name, dtype, tuple(int(n) for n in array.shape), _bytes_view(flat))


def _is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _from_torch(name: str, tensor: Any) -> RawTensor:
    torch: Any = sys.modules["torch"]
    spelled = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(int(n) for n in tensor.shape)
    dtype = _SAFETENSORS_NAMES.get(spelled)
    if spelled == "float4_e2m1fn_x2" and shape:
        dtype, shape = "F4", (*shape[:-1], shape[-1] * 2)
    if dtype is None:
        raise InvalidInput(f"tensor {name!r} has unknown torch dtype {tensor.dtype}", tensor=name)
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        raise InvalidInput(
            f"tensor {name!r} is meta, sparse or quantized: no plain bytes", tensor=name
        )
    if hasattr(tensor, "full_tensor"):
        raise InvalidInput(
            f"tensor {name!r} is distributed; gather it first (full_tensor())", tensor=name
        )
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
    return RawTensor(name, dtype, shape, _bytes_view(flat))
