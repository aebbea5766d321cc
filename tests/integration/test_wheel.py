"""The repaired wheel carries its libraries and works in an empty environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

# What a plain Linux system always has: libc, the C++ runtime, and the loader.
SYSTEM_LIBRARIES = re.compile(
    r"^(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux-x86-64|ld-linux-aarch64)\."
)


@pytest.fixture(scope="module")
def wheel() -> Path:
    path = os.environ.get("STITCH_WHEEL")
    assert path, "STITCH_WHEEL must name the repaired wheel; run `make wheel`"
    return Path(path)


def needed(library: Path) -> set[str]:
    out = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    return set(re.findall(r"\(NEEDED\).*\[(.+?)\]", out.stdout))


def test_it_needs_nothing_but_libc_and_the_cxx_runtime(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    libraries = list(tmp_path.rglob("*.so*"))
    assert any(path.name.startswith("_core") for path in libraries)
    carried = {path.name for path in libraries}
    for path in libraries:
        foreign = {n for n in needed(path) if not SYSTEM_LIBRARIES.match(n)} - carried
        assert not foreign, f"{path.name} needs {foreign}"


def test_it_ships_the_package_the_stub_and_the_kernels(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"stitch/py.typed", "stitch/_core.pyi", "stitch/kernels/__init__.py"} <= names
    assert not [n for n in names if n.startswith(("tests/", "bench/", "csrc/"))]


def test_it_installs_and_imports_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    install = [python, "-m", "pip", "--disable-pip-version-check", "-q", "install", str(wheel)]
    subprocess.run(install, check=True)
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    code = (
        "import stitch, stitch._core as core, stitch.kernels; from stitch import checksum;"
        "print(checksum.xxh3_128(b'abc'), core.isa())"
    )
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True, env=clean, cwd=tmp_path
    )
    assert done.stdout.split()[0] == "06b05ab6733a618578af5f94892f3950"
    listed = subprocess.run(
        [environment / "bin" / "stitch", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=clean,
        cwd=tmp_path,
    )
    assert "materialize" in listed.stdout
