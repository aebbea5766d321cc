"""The Triton XOR kernel against its reference and the native core, in Triton's CPU interpreter.

The interpreter proves the logic; races and alignment need a device. It must be chosen before
triton is imported, so each case runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="the kernels need torch")

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = """
import torch
from stitch import _core
from stitch.kernels.xor_apply import xor_apply, xor_apply_ref

generator = torch.Generator().manual_seed(1)

def random_bytes(count):
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)

for size in (0, 1, 3, 4, 7, 4096, 4 * 4096, 4 * 4096 + 5, 50_001):
    for skip in (0, 1, 4):
        base, delta = random_bytes(size + skip)[skip:], random_bytes(size + skip)[skip:]
        delta[: size // 2] = 0
        expected, found = base.clone(), base.clone()
        xor_apply_ref(expected, delta)
        xor_apply(base, delta)
        assert torch.equal(base, expected), (size, skip)
        blob = _core.zstd_compress(delta.numpy())
        _core.xor_apply(blob, found.numpy(), found.numpy(), "none", 0)
        assert torch.equal(found, expected), (size, skip)
        xor_apply(base, delta)
        xor_apply_ref(expected, delta)
        assert torch.equal(base, expected)

nans = torch.full((6,), float("nan"), dtype=torch.bfloat16)
bits = torch.arange(6, dtype=torch.int16)
wanted = nans.view(torch.int16) ^ bits
xor_apply(nans, bits)
assert torch.equal(nans.view(torch.int16), wanted)

for base, delta in (
    (torch.zeros(4), torch.zeros(5)),
    (torch.zeros(4, 4).T, torch.zeros(4, 4)),
    (nans, nans),
):
    try:
        xor_apply(base, delta)
    except ValueError:
        continue
    raise AssertionError("accepted")
print("checked")
"""


def test_the_package_imports_without_triton() -> None:
    code = "import sys, stitch.kernels; assert 'triton' not in sys.modules; print('light')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "light", done.stderr


def test_the_reference_is_its_own_undo() -> None:
    from stitch.kernels.xor_apply import xor_apply_ref

    base = torch.arange(100, dtype=torch.float32)
    delta = torch.randint(0, 2**31 - 1, (100,), dtype=torch.int32)
    before = base.clone()
    xor_apply_ref(base, delta)
    assert not torch.equal(base, before)
    xor_apply_ref(base, delta)
    assert torch.equal(base, before)


def test_without_triton_the_launcher_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stitch.kernels.xor_apply import xor_apply

    monkeypatch.setattr("stitch.kernels.xor_apply.triton", None)  # as after a failed import
    with pytest.raises(RuntimeError, match=r"stitch-rl\[kernels\]"):
        xor_apply(torch.zeros(1), torch.zeros(1))


@pytest.mark.skipif(
    not HAS_TRITON, reason="triton is not installed; the kernel is not checked here"
)
def test_kernel_equals_reference_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.stdout.strip() == "checked", done.stderr[-2000:]
