"""`import stitch` stays light: no heavy module, little time, lazy public names."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import stitch

HEAVY = [
    "torch",
    "numpy",
    "boto3",
    "ray",
    "modal",
    "sglang",
    "vllm",
    "aiohttp",
    "pydantic",
    "triton",
]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_import_loads_nothing_heavy() -> None:
    code = "import sys, json, stitch; print(json.dumps(sorted(sys.modules)))"
    loaded = {name.split(".")[0] for name in json.loads(run(code))}
    assert not loaded & set(HEAVY)


def test_the_public_surface_is_pinned() -> None:
    assert stitch.__all__ == [
        "ActivationMode",
        "Client",
        "Constraint",
        "LocalPool",
        "Publication",
        "Publisher",
        "Ref",
        "Span",
        "StitchError",
        "at_least",
        "exactly",
        "lag",
        "open_store",
    ]


@pytest.mark.parametrize("name", stitch.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(stitch, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = stitch.nothing


def test_names_load_without_torch() -> None:
    names = ", ".join(stitch.__all__)
    code = f"import sys; from stitch import {names}; print('torch' in sys.modules)"
    assert run(code).strip() == "False"
