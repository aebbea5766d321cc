"""Tensors as bytes: numpy and torch inputs, dtypes, what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from stitch import _core
from stitch.errors import CorruptData, InvalidInput, Unsupported
from stitch.format.dtypes import DTYPE_BITS, nbytes_of
from stitch.format.tensors import RawTensor, as_raw_tensors

TORCH_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.complex64: "C64",
}


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_torch_dtype_keeps_its_bits(dtype: torch.dtype) -> None:
    width = dtype.itemsize
    raw = np.random.default_rng(1).integers(0, 2 if dtype == torch.bool else 256, 6 * width)
    tensor = torch.from_numpy(raw.astype(np.uint8)).view(dtype).reshape(2, 3)
    (found,) = as_raw_tensors({"a": tensor})
    assert (found.dtype, found.shape) == (TORCH_DTYPES[dtype], (2, 3))
    assert bytes(found.data) == raw.astype(np.uint8).tobytes()
    assert found.nbytes == nbytes_of(found.dtype, found.shape)


def test_packed_fp4_counts_elements() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    (found,) = as_raw_tensors({"a": tensor})
    assert (found.dtype, found.shape, found.nbytes) == ("F4", (2, 6), 6)


def test_order_views_and_odd_shapes() -> None:
    grid = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    found = as_raw_tensors(
        {
            "z": grid.t(),
            "a": np.array(3, np.float32),
            "m": torch.zeros(0, 5, dtype=torch.bfloat16),
            "k": torch.tensor(1.5).requires_grad_(),
            "n": np.arange(6, dtype="<i2")[::2],
        }
    )
    assert [raw.name for raw in found] == ["a", "k", "m", "n", "z"]
    by_name = {raw.name: raw for raw in found}
    assert by_name["a"].shape == ()
    assert by_name["k"].nbytes == 4
    assert (by_name["m"].shape, by_name["m"].nbytes) == ((0, 5), 0)
    assert bytes(by_name["n"].data) == b"\0\0\2\0\4\0"
    assert bytes(by_name["z"].data) == grid.t().contiguous().numpy().tobytes()


def test_a_contiguous_tensor_is_viewed_not_copied() -> None:
    array = np.zeros(4, np.float32)
    tensor = torch.zeros(4)
    first, second = as_raw_tensors({"a": array, "b": tensor})
    array[0], tensor[0] = 1, 1
    assert bytes(first.data)[:4] == bytes(second.data)[:4] == b"\x00\x00\x80\x3f"


@pytest.mark.parametrize(
    "value",
    [
        [1.0],
        None,
        b"1234",
        np.zeros(2, ">f4"),
        np.zeros(2, "U3"),
        np.zeros(2, object),
        np.zeros(2, np.complex128),
        torch.zeros(2, device="meta"),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, dtype=torch.complex128),
        RawTensor("b", "F32", (1,), b"1234"),
        RawTensor("a", "F32", (2,), b"1234"),
        RawTensor("a", "F4_X", (4,), b"1234"),
        RawTensor("a", "F32", (-1,), b""),
        RawTensor("a", "F4", (3,), b"12"),
        RawTensor("a", "U8", (2**40, 2**40), b""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_refused(value: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        as_raw_tensors({"a": value})
    assert caught.value.fields["tensor"] == "a"


@pytest.mark.parametrize("name", ["", "__metadata__", "a\0b", "x" * 5000, "\ud800"])
def test_names_that_no_header_carries(name: str) -> None:
    with pytest.raises(InvalidInput):
        as_raw_tensors({name: np.zeros(1, np.float32)})


@pytest.mark.parametrize("tensors", [None, [1], {1: np.zeros(1), "a": np.zeros(1)}])
def test_what_is_no_mapping_from_names(tensors: object) -> None:
    with pytest.raises(InvalidInput):
        as_raw_tensors(tensors)  # type: ignore[arg-type]


def test_sizes() -> None:
    assert nbytes_of("F4", (3, 2)) == 3
    assert nbytes_of("F6_E2M3", (4,)) == 3
    assert nbytes_of("BF16", ()) == 2
    assert nbytes_of("F64", (0, 2**40)) == 0
    with pytest.raises(CorruptData):
        nbytes_of("F4", (3,))
    with pytest.raises(CorruptData):
        nbytes_of("F32", (2**40, 2**40))
    with pytest.raises(Unsupported):
        nbytes_of("F4_X", (2,))
    assert all(bits in (4, 6, 8, 16, 32, 64) for bits in DTYPE_BITS.values())


@pytest.mark.parametrize("dtype", [*DTYPE_BITS, "F4_X", "F8_E8M1", "U4", "", "f32"])
def test_the_native_header_parser_knows_the_same_dtypes(dtype: str) -> None:
    nbytes = nbytes_of(dtype, (8,)) if dtype in DTYPE_BITS else 8
    header = json.dumps({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, nbytes]}}).encode()
    head = len(header).to_bytes(8, "little") + header
    if dtype in DTYPE_BITS:
        ((name, found, shape, begin, end),), _, at = _core.parse_safetensors_header(
            head, len(head) + nbytes
        )
        assert (name, found, tuple(shape), begin, end, at) == (
            "a",
            dtype,
            (8,),
            0,
            nbytes,
            len(head),
        )
    else:
        with pytest.raises((CorruptData, Unsupported)):
            _core.parse_safetensors_header(head, len(head) + nbytes)
