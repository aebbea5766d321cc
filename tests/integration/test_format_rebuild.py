"""`rebuild` and the readers as replicas use them: what is delivered, in what order, how bounded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from manifest_damages import KEY
from publication_forge import edit_metadata, file_of, read_index, version_dir
from stitch_tree import (
    State,
    changed_state,
    digest_of,
    publish_anchor,
    publish_delta,
    small_state,
    write_base,
    write_chain,
)

from stitch.errors import CorruptData, Forbidden, InvalidInput, NotVisibleYet, Unavailable
from stitch.format.checkpoint import Checkpoint
from stitch.format.publication import PublicationReader
from stitch.format.rebuild import RebuildCancelled, RebuiltTensor, rebuild
from stitch.format.tensors import RawTensor
from stitch.types import Kind, Ref, version_name


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("rebuild")
    write_chain(found)
    return found


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    return write_chain(tmp_path_factory.mktemp("states"))


@pytest.fixture
def base(root: Path) -> Iterator[Checkpoint]:
    with Checkpoint.open(root / "base") as found:
        yield found


def chain_of(root: Path, *versions: int) -> list[PublicationReader]:
    return [PublicationReader.open(root / "updates" / version_name(v)) for v in versions]


def changed_between(before: State, after: State) -> set[str]:
    return {name for name in after if bytes(before[name].data) != bytes(after[name].data)}


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_changed_tensor_once_in_its_final_state(
    root: Path, base: Checkpoint, states: list[State], threads: int
) -> None:
    delivered: list[RebuiltTensor] = []
    report = rebuild(base, chain_of(root, 1), on_tensor=delivered.append, threads=threads)
    assert [tensor.name for tensor in delivered] == list(report.changed)
    assert set(report.changed) == changed_between(states[0], states[1])
    for tensor in delivered:
        assert bytes(tensor.data) == bytes(states[1][tensor.name].data)
        assert tensor.data.readonly
        assert report.checksums[tensor.name] == tensor.checksum
    assert report.model_digest == digest_of(states[1])
    assert report.removed == ()
    assert report.checksums.keys() == base.tensors.keys()


def test_an_anchor_delivers_what_differs_from_the_base(
    root: Path, base: Checkpoint, states: list[State]
) -> None:
    names: list[str] = []
    versions = (1, 2, 3, 4, 5)
    report = rebuild(base, chain_of(root, *versions), on_tensor=lambda t: names.append(t.name))
    assert set(names) == changed_between(states[0], states[5])
    assert report.model_digest == digest_of(states[5])
    again = rebuild(base, chain_of(root, 2, 3, 4, 5), on_tensor=lambda t: None)
    assert again.model_digest == report.model_digest
    assert again.changed == report.changed


def test_known_checksums_spare_the_unchanged_tensors(root: Path, base: Checkpoint) -> None:
    sums = base.checksums()
    viewed: list[str] = []

    class Source:
        tensors = base.tensors

        def view(self, name: str) -> memoryview:
            viewed.append(name)
            return base.view(name)

    plain = rebuild(base, chain_of(root, 1), on_tensor=lambda t: None)
    spared = rebuild(Source(), chain_of(root, 1), on_tensor=lambda t: None, base_checksums=sums)
    assert spared.model_digest == plain.model_digest
    empty = rebuild(base, [], on_tensor=lambda t: None, base_checksums=sums)
    assert empty.model_digest == base.model_digest()
    assert empty.changed == ()


def test_a_wrong_base_checksum_is_noticed(root: Path, base: Checkpoint) -> None:
    sums = base.checksums()
    sums["model.norm.weight"] = sums["lm_head.weight"]
    with pytest.raises(CorruptData):
        rebuild(base, chain_of(root, 1), on_tensor=lambda t: None, base_checksums=sums)


def test_cancelled(root: Path, base: Checkpoint) -> None:
    delivered: list[str] = []
    with pytest.raises(RebuildCancelled):
        rebuild(
            base,
            chain_of(root, 1),
            on_tensor=lambda t: delivered.append(t.name),
            cancelled=lambda: len(delivered) >= 1,
        )
    assert len(delivered) == 1


def test_a_failing_consumer_stops_the_work(root: Path, base: Checkpoint) -> None:
    def fail(tensor: RebuiltTensor) -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        rebuild(base, chain_of(root, 1), on_tensor=fail, threads=4)


def test_memory_in_flight_is_bounded(root: Path, base: Checkpoint, states: list[State]) -> None:
    names: list[str] = []
    report = rebuild(
        base,
        chain_of(root, 1),
        on_tensor=lambda t: names.append(t.name),
        threads=4,
        in_flight_bytes_max=1,
    )
    assert tuple(names) == report.changed
    assert report.model_digest == digest_of(states[1])


def test_the_base_version_must_be_the_one_applied_to(root: Path, base: Checkpoint) -> None:
    with pytest.raises(CorruptData, match="applies to version 0"):
        rebuild(base, chain_of(root, 1), on_tensor=lambda t: None, base_version=3)
    with pytest.raises(CorruptData, match="applies to version 2"):
        rebuild(base, chain_of(root, 1, 3), on_tensor=lambda t: None)


def test_reader_facts(root: Path) -> None:
    delta, anchor, empty = chain_of(root, 1, 2, 4)
    assert (delta.kind, delta.version, delta.base_version) == (Kind.DELTA, 1, 0)
    assert (delta.encoding, delta.checksum_format) == ("xor", "xxh3-128")
    assert delta.checkpoint is None
    assert delta.manifest is not None
    assert delta.manifest.tensors.keys() == delta.payloads.keys()
    assert anchor.checkpoint is not None
    assert anchor.payloads == {}
    assert anchor.manifest is not None
    assert anchor.manifest.parent == delta.manifest_digest
    assert empty.payloads == {}


def test_expectations(root: Path, tmp_path: Path) -> None:
    directory = root / "updates" / "weight_v000001"
    assert PublicationReader.open(directory, expect=Ref("run-s", 1)).version == 1
    for expect in (2, Ref("run-t", 1), Ref("run-s", 2)):
        with pytest.raises(CorruptData) as caught:
            PublicationReader.open(directory, expect=expect)
        assert caught.value.fields["reason"]
    copied = tmp_path / "cache"
    shutil.copytree(directory, copied)
    assert PublicationReader.open(copied, expect=1).version == 1
    with pytest.raises(InvalidInput):
        PublicationReader.open(copied)
    with pytest.raises(NotVisibleYet):
        PublicationReader.open(tmp_path / "weight_v000009")


def test_a_trust_list_refuses_foreign_publications(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "updates", tmp_path / "updates")
    directory = version_dir(tmp_path / "updates", 1)
    PublicationReader.open(directory, trusted_only=True).close()
    assert KEY in read_index(tmp_path / "updates", 1)["metadata"]
    edit_metadata(tmp_path / "updates", 1, **{KEY: ..., f"{KEY}_blake3": ...})
    assert PublicationReader.open(directory).manifest is None
    with pytest.raises(Forbidden):
        PublicationReader.open(directory, trusted_only=True)


def test_errors_carry_file_tensor_and_reason(root: Path, base: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "root")
    updates = tmp_path / "root" / "updates"
    edit_metadata(updates, 1, **{KEY: ..., f"{KEY}_blake3": ..., "checksum_format": "adler32"})
    with pytest.raises(CorruptData) as caught:
        PublicationReader.open(version_dir(updates, 1))
    fields = caught.value.fields
    assert fields["version"] == 1
    assert fields["file"].endswith(".safetensors")
    assert fields["tensor"] in base.tensors
    assert "8 hex digits" in fields["reason"]
    file = file_of(updates, 2, "lm_head.weight")
    file.entry("lm_head.weight")["shape"] = [1]
    file.save()
    with pytest.raises(CorruptData) as caught:
        PublicationReader.open(version_dir(updates, 2))
    assert caught.value.fields["tensor"] == "lm_head.weight"


def test_an_anchor_may_add_remove_and_retype_tensors(tmp_path: Path) -> None:
    """Only a full version can; a later delta then speaks of the new set."""
    before = small_state()
    after = dict(before)
    del after["model.flag"]
    after["model.new"] = RawTensor("model.new", "F32", (2,), b"12345678")
    norm = after["model.norm.weight"]
    after["model.norm.weight"] = RawTensor(norm.name, "BF16", (2, 24), norm.data)
    write_base(tmp_path / "base", before)
    parent = publish_anchor(tmp_path / "updates", Ref("run-s", 1), after)
    final = changed_state(after, 9, share=1.0)
    publish_delta(tmp_path / "updates", Ref("run-s", 2), after, final, parent=parent)
    delivered: dict[str, RebuiltTensor] = {}
    with Checkpoint.open(tmp_path / "base") as base:
        report = rebuild(
            base, chain_of(tmp_path, 1), on_tensor=lambda t: delivered.update({t.name: t})
        )
        assert set(report.changed) == {"model.new", "model.norm.weight"}
        assert report.removed == ("model.flag",)
        assert delivered["model.norm.weight"].shape == (2, 24)
        assert report.model_digest == digest_of(after)
        with pytest.raises(CorruptData):
            rebuild(base, chain_of(tmp_path, 2), on_tensor=lambda t: None)
        report = rebuild(base, chain_of(tmp_path, 1, 2), on_tensor=lambda t: None)
        assert report.model_digest == digest_of(final)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


@pytest.mark.parametrize("what", ["base", "updates"])
@pytest.mark.parametrize("harm", [lambda path: os.truncate(path, 0), Path.unlink, grow])
def test_files_that_change_while_open_are_an_error_and_no_signal(
    what: str, harm: Callable[[Path], object], root: Path, tmp_path: Path
) -> None:
    """A mapping of a file that is cut short would kill the process."""
    shutil.copytree(root, tmp_path / "root")
    with Checkpoint.open(tmp_path / "root" / "base") as base:
        chain = chain_of(tmp_path / "root", 1)
        for path in (tmp_path / "root" / what).rglob("*.safetensors"):
            harm(path)
        with pytest.raises(Unavailable, match="changed or vanished"):
            rebuild(base, chain, on_tensor=lambda t: None)


def test_a_chain_of_any_length_keeps_no_file_open(root: Path) -> None:
    """Other trainers never write a full version: chains outgrow a process's descriptors."""
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with Checkpoint.open(root / "base") as base:
        chain = chain_of(root, 1, 2, 3)
        rebuild(base, chain, on_tensor=lambda t: None, everything=True)
        assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def test_an_anchor_of_byte_vectors_is_no_delta(tmp_path: Path) -> None:
    """A tensor may be called `format`, as the key is that a full version's files carry."""
    state = {"format": RawTensor("format", "U8", (3,), b"abc")}
    publish_anchor(tmp_path / "updates", Ref("run-s", 1), state, files=1)
    (reader,) = chain_of(tmp_path, 1)
    assert reader.checkpoint is not None
    assert bytes(reader.checkpoint.read("format")) == b"abc"
