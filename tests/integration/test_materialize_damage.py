"""Every damage that the format's rules name is refused, and leaves no trace."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from manifest_damages import CHAIN, MANIFEST_DAMAGES, sealed
from publication_damages import DAMAGES, Damage
from publication_forge import File, snapshot, tensors_of
from stitch_tree import write_chain

from stitch.cli import main

SLIME = Path(__file__).resolve().parents[1] / "data" / "slime"
ALL = [*DAMAGES, *MANIFEST_DAMAGES]
_refused: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def report(say: Callable[[str], None]) -> Iterator[None]:
    yield
    say(f"materialize refused {len(_refused)} of {len(ALL)} damages")


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stitch-chain")
    write_chain(root)
    return root


def materialize(base: Path, updates: Path, version: int, out: Path, *more: str) -> int:
    arguments = ["--base", str(base), "--updates", str(updates), "--out", str(out)]
    return main(["materialize", *arguments, "--version", str(version), "--quiet", *more])


def copy_of(stream: str, chain: Path, root: Path) -> None:
    if stream == CHAIN:
        shutil.copytree(chain, root)
    else:
        shutil.copytree(SLIME / "streams" / stream, root / "updates")
        shutil.copytree(SLIME / "base", root / "base")


def test_every_damage_has_its_own_id() -> None:
    assert len({damage.id for damage in ALL}) == len(ALL)


@pytest.mark.parametrize("damage", ALL, ids=lambda damage: damage.id)
def test_damage_is_refused(
    damage: Damage, chain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    copy_of(damage.stream, chain, root)
    damage.mutate(root / "updates")
    before = snapshot(tmp_path)
    code = materialize(root / "base", root / "updates", damage.version, root / "out")
    printed = capsys.readouterr()
    assert code == damage.code, printed.err
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.endswith(f"retry: {'yes' if damage.retry else 'no'}\n"), printed.err
    for words in damage.says:
        assert words in printed.err
    assert snapshot(tmp_path) == before
    _refused.append(damage.id)


@pytest.mark.parametrize("stream", sorted({damage.stream for damage in ALL}))
def test_the_undamaged_streams_are_accepted(stream: str, chain: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    copy_of(stream, chain, root)
    for version in range(1, 5):
        assert materialize(root / "base", root / "updates", version, root / f"out{version}") == 0


def test_a_stitch_chain_gives_every_state_bit_for_bit(tmp_path: Path) -> None:
    states = write_chain(tmp_path)
    for version, state in enumerate(states):
        out = tmp_path / f"out{version}"
        more = ["--run-id", "run-s"]
        assert materialize(tmp_path / "base", tmp_path / "updates", version, out, *more) == 0
        assert tensors_of(out) == {
            name: (t.dtype, t.shape, bytes(t.data)) for name, t in state.items()
        }


def test_another_run_is_refused(chain: Path, tmp_path: Path) -> None:
    more = ["--run-id", "run-t"]
    assert materialize(chain / "base", chain / "updates", 1, tmp_path / "out", *more) == 1


@pytest.mark.parametrize("name", ["lm_head.weight", "model.flag"])
def test_a_base_of_other_weights_is_the_bases_fault(
    name: str, chain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base digest tells a wrong base from a damaged chain, in changed and unchanged tensors."""
    shutil.copytree(chain, tmp_path / "root")
    base = tmp_path / "root" / "base"
    file = next(f for f in map(File, base.glob("*.safetensors")) if name in f.names)
    data = file.bytes_of(name)
    shape = file.entry(name)["shape"]
    file.set_bytes(name, bytes([data[0] ^ 1]) + data[1:], shape=shape)
    file.save()
    assert materialize(base, tmp_path / "root" / "updates", 1, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "the base" in error
    assert error.endswith("retry: no\n")


def test_unknown_manifest_fields_and_minors_are_ignored(chain: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(chain, root)

    def newer(manifest: dict[str, object]) -> None:
        manifest["format"] = {"major": 1, "minor": 9, "patch": 3}
        manifest["later"] = {"a": [1, 2]}

    sealed(5, newer)(root / "updates")
    assert materialize(root / "base", root / "updates", 5, tmp_path / "out") == 0
