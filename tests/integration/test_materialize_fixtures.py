"""`stitch materialize` against data made by other trainers' own encoders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from publication_forge import tensors_of

from stitch.cli import main

DATA = Path(__file__).resolve().parents[1] / "data"
SLIME = DATA / "slime"
EXPECTED = json.loads((SLIME / "expected.json").read_text())
_checked = {"versions": 0, "tensors": 0}


def cases() -> list[tuple[Path, int, int, str]]:
    """(updates, version, base version, entry of expected.json) for every stream and version."""
    found = []
    for name, stream in json.loads((SLIME / "streams.json").read_text()).items():
        seed = stream["seed_version"]
        found += [(SLIME / name, int(v), seed, e) for v, e in stream["expected"].items()]
    for directory in sorted((DATA / "miles" / "streams").iterdir()):
        found += [(directory, v, 0, f"{v:06d}") for v in range(5)]
    return found


@pytest.fixture(scope="module", autouse=True)
def report(say: Callable[[str], None]) -> Iterator[None]:
    yield
    say(f"materialize: {_checked['tensors']} tensors of {_checked['versions']} versions match")


@pytest.mark.parametrize(
    ("updates", "version", "base_version", "entry"),
    cases(),
    ids=lambda value: value.relative_to(DATA).as_posix() if isinstance(value, Path) else str(value),
)
def test_every_tensor_has_the_recorded_sha256(
    updates: Path, version: int, base_version: int, entry: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code = main(
        [
            "materialize",
            "--quiet",
            *("--base", str(SLIME / "base")),
            *("--updates", str(updates)),
            *("--version", str(version)),
            *("--base-version", str(base_version)),
            *("--out", str(out)),
        ]
    )
    assert code == 0
    expected = EXPECTED[entry]["tensors"]
    found = tensors_of(out)
    assert found.keys() == expected.keys()
    for name, (dtype, shape, data) in found.items():
        want = expected[name]
        assert (dtype, list(shape)) == (want["dtype"], want["shape"]), name
        assert hashlib.sha256(data).hexdigest() == want["sha256"], name
        _checked["tensors"] += 1
    _checked["versions"] += 1
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 318605, "version": f"{version:06d}"}
    assert index["weight_map"].keys() == expected.keys()
    shards = {"model.safetensors.index.json", "config.json", *index["weight_map"].values()}
    assert {path.name for path in out.iterdir()} == shards
    # The seed's sharding is kept: three shards after the full version in the middle, else two.
    full = updates.name == "full-in-the-middle" and version >= 2
    assert len(shards) == (5 if full else 4)


def test_a_resumed_run_with_the_wrong_base_version_waits_for_versions_that_never_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--base", str(SLIME / "base"), "--updates", str(SLIME / "streams/resumed-at-5")]
    out = ["--out", str(tmp_path / "out")]
    assert main(["materialize", *arguments, "--version", "7", *out]) == 1
    error = capsys.readouterr().err
    assert error.endswith("retry: yes\n")
    assert "weight_v000005" in error
