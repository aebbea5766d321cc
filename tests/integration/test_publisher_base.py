"""A publisher on a real base checkpoint: what goes into versions, restarts, forks."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stitch.env import Env
from stitch.errors import Conflict, InvalidInput, Unavailable
from stitch.format.checkpoint import Checkpoint
from stitch.format.publication import PublicationReader
from stitch.format.rebuild import RebuiltTensor, rebuild
from stitch.format.tensors import RawTensor
from stitch.publisher import Publisher
from stitch.publisher.lineage import Loader
from stitch.stores import Store, open_store
from stitch.stores.base import INDEX_NAME
from stitch.stores.versions import load_run
from stitch.testing.memory_store import MemoryStore
from stitch.testing.publisher_suite import WAIT_S, model, state_of
from stitch.types import Kind, Ref

SLIME = Path(__file__).resolve().parents[1] / "data" / "slime"


BASE = SLIME / "base"


NORM = "model.layers.0.input_layernorm.weight"


def base_tensors() -> dict[str, RawTensor]:
    with Checkpoint.open(BASE) as checkpoint:
        return {
            name: RawTensor(name, t.dtype, tuple(t.shape), bytearray(checkpoint.view(name)))
            for name, t in checkpoint.tensors.items()
        }


def flip(tensor: RawTensor, at: int) -> None:
    assert isinstance(tensor.data, bytearray)
    tensor.data[at] ^= 0x5A


def state_on_base(root: Path, *versions: int) -> dict[str, bytes]:
    """What a reader that has the base makes of a chain of deltas."""
    found: dict[str, bytes] = {}

    def keep(tensor: RebuiltTensor) -> None:
        found[tensor.name] = bytes(tensor.data)

    readers = [
        PublicationReader.open(root / "updates" / f"weight_v{v:06d}", expect=v) for v in versions
    ]
    with Checkpoint.open(BASE) as checkpoint:
        rebuild(checkpoint, readers, on_tensor=keep, everything=True, base_version=versions[0] - 1)
    for reader in readers:
        reader.close()
    return found


def as_bytes(tensors: dict[str, RawTensor]) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in tensors.items()}


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
def test_the_first_version_is_a_delta_on_the_base(
    tmp_path: Path, encoding: str, checksum: str
) -> None:
    """Every dtype of the base, one changed byte each, in each encoding and checksum kind."""
    tensors = base_tensors()
    for tensor in tensors.values():
        if tensor.nbytes:
            flip(tensor, tensor.nbytes // 2)
    with Publisher(
        str(tmp_path), run_id="a", base=BASE, encoding=encoding, checksum=checksum
    ) as publisher:
        published = publisher.publish(tensors).wait(WAIT_S)
    assert published.kind is Kind.DELTA
    assert state_on_base(tmp_path, 1) == as_bytes(tensors)
    index = json.loads((tmp_path / "updates" / "weight_v000001" / INDEX_NAME).read_bytes())
    assert index["metadata"]["delta_encoding"] == encoding
    assert index["metadata"]["checksum_format"] == checksum
    assert set(index["weight_map"]) == {n for n, t in tensors.items() if t.nbytes}


def test_the_record_names_the_base_by_digest(tmp_path: Path) -> None:
    with Publisher(str(tmp_path), run_id="a", base=BASE, boot_version=5) as publisher:
        assert publisher.claim() == Ref("a", 5)
        assert publisher.publish({}).wait(WAIT_S).ref == Ref("a", 6)
    record = json.loads((tmp_path / "runs" / "a" / "run.json").read_bytes())
    with Checkpoint.open(BASE) as checkpoint:
        assert record["base_digest"] == checkpoint.model_digest()
    assert (record["boot_version"], record["updates_dir"]) == (5, "updates")


async def test_a_base_in_files_that_changes_is_an_error_and_no_signal(tmp_path: Path) -> None:
    """Several ranks leave the base in its files: what they read there is checked every time."""
    base = tmp_path / "base"
    shutil.copytree(BASE, base)
    loader = Loader(MemoryStore(), base, tmp_path, Env(), 2, copy_base=False)
    state = await loader.base_state(Ref("a", 0))
    wanted = as_bytes(base_tensors())
    assert {name: bytes(state.view(name)) for name in state.tensors} == wanted
    shard = next(path for path in base.glob("*.safetensors") if path.stat().st_size > 5000)
    found = shard.stat()
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(Unavailable, match="changed while"):
        _ = [state.view(name) for name in state.tensors]
    os.truncate(shard, 4096)
    with pytest.raises(Unavailable, match="changed or vanished"):
        _ = [state.view(name) for name in state.tensors]


def test_another_base_is_refused(tmp_path: Path) -> None:
    root, other = tmp_path / "store", tmp_path / "other"
    with Publisher(str(root), run_id="a", base=BASE) as publisher:
        publisher.claim()
    shutil.copytree(BASE, other)
    (shard, *_) = sorted(other.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with (
        Publisher(str(root), run_id="a", base=other) as publisher,
        pytest.raises(InvalidInput, match="booted from"),
    ):
        publisher.publish({})
    with (
        Publisher(str(root), run_id="a", base=BASE, boot_version=3) as publisher,
        pytest.raises(InvalidInput, match="boots from version 0"),
    ):
        publisher.claim()


def test_an_anchor_carries_config_and_tokenizer(tmp_path: Path) -> None:
    """A public reader keeps only the files that a full version has."""
    base = tmp_path / "base"
    shutil.copytree(BASE, base)
    (base / "config.json").write_text('{"model_type": "x"}')
    root = tmp_path / "store"
    with Publisher(str(root), run_id="a", base=base) as publisher:
        publisher.publish({}, anchor=True).wait(WAIT_S)
    with Publisher(str(root), run_id="a") as publisher:
        publisher.publish({}, anchor=True).wait(WAIT_S)
    for version in (1, 2):
        folder = root / "updates" / f"weight_v{version:06d}"
        assert (folder / "config.json").read_text() == '{"model_type": "x"}'
        with PublicationReader.open(folder) as reader:
            assert reader.checkpoint is not None
            assert [path.name for path in reader.checkpoint.side_files] == ["config.json"]


def test_a_side_file_that_no_manifest_can_name_is_left_out(tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(BASE, base)
    for name in ("Some License.md", "_x.json", "\N{LATIN SMALL LETTER U WITH DIAERESIS}.txt"):
        (base / name).write_text("x")
    with Publisher(str(tmp_path / "root"), run_id="a", base=base) as publisher:
        publisher.publish(base_tensors(), anchor=True).wait(WAIT_S)
    found = {path.name for path in (tmp_path / "root" / "updates" / "weight_v000001").iterdir()}
    assert {name for name in found if name.endswith(("md", "txt"))} == set()
    assert "config.json" in found


def test_documents_that_no_reader_takes_are_not_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stitch.publisher.commit.INDEX_SIZE_MAX", 500)
    with Publisher(str(tmp_path), run_id="a") as publisher:
        with pytest.raises(InvalidInput, match="shorter names"):
            publisher.publish({f"layer{i}": np.ones(1) for i in range(30)}).wait(WAIT_S)
        assert publisher.publish({"w": np.ones(1)}).wait(WAIT_S).ref == Ref("a", 1)


def test_a_restart_with_a_pruned_chain_writes_an_anchor(tmp_path: Path) -> None:
    """Deltas that are gone are never applied around; the state comes from the trainer (B23)."""
    tensors = base_tensors()
    with Publisher(str(tmp_path), run_id="a", base=BASE) as publisher:
        for number in range(1, 5):
            flip(tensors[NORM], number)
            publisher.publish(tensors).wait(WAIT_S)
    for version in (1, 2):
        for path in (tmp_path / "updates" / f"weight_v{version:06d}").glob("*.safetensors"):
            path.unlink()
    with Publisher(str(tmp_path), run_id="a", base=BASE) as publisher:
        assert publisher.claim() == Ref("a", 4)
        some = {NORM: tensors[NORM]}
        with pytest.raises(InvalidInput, match="every tensor"):
            publisher.publish(some).wait(WAIT_S)
        flip(tensors[NORM], 0)
        published = publisher.publish(tensors).wait(WAIT_S)
    assert (published.ref, published.kind) == (Ref("a", 5), Kind.ANCHOR)
    assert state_of(open_store(str(tmp_path)), Ref("a", 5)) == as_bytes(tensors)


def test_anchors_come_at_least_every_so_often(tmp_path: Path) -> None:
    tensors = model()
    kinds = []
    for _ in range(3):
        with Publisher(str(tmp_path), run_id="a", anchor_every=4, anchor_ratio=100.0) as publisher:
            for _ in range(3):
                tensors["c.bias"] += 1
                kinds.append(publisher.publish(tensors).wait(WAIT_S).kind.value)
    assert kinds == ["anchor", "delta", "delta", "delta"] * 2 + ["anchor"], (
        "the count must go on over restarts"
    )


def test_a_delta_that_would_not_pay_becomes_an_anchor(tmp_path: Path) -> None:
    """Empty, tiny, 40 % and all of the bytes: no cliff, and never more than the model (B88)."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((256, 256)).astype(np.float32)
    with Publisher(str(tmp_path), run_id="a") as publisher:
        full = publisher.publish({"w": weights}).wait(WAIT_S).bytes
        sizes = []
        for share in (0.0, 0.001, 0.4, 1.0):
            rows = round(share * 256 * 256)
            weights.reshape(-1)[:rows] = rng.standard_normal(rows).astype(np.float32)
            published = publisher.publish({"w": weights}).wait(WAIT_S)
            sizes.append((published.kind, published.bytes))
    assert [kind for kind, _ in sizes] == [Kind.DELTA, Kind.DELTA, Kind.DELTA, Kind.ANCHOR]
    assert sizes[0][1] < sizes[1][1] < sizes[2][1] < full
    assert sizes[3][1] <= full + 200


@pytest.mark.parametrize("rebase", [False, True])
def test_a_model_without_tensors_is_refused(rebase: bool) -> None:
    store = MemoryStore()
    with Publisher(store, run_id="a") as publisher:
        if rebase:
            publisher.publish(model()).wait(WAIT_S)
        with pytest.raises(InvalidInput, match="no tensors"):
            publisher.publish({}, rebase=rebase).wait(WAIT_S)
        publisher.publish(model(1)).wait(WAIT_S)


def test_a_fork_of_a_fork_goes_on_after_a_restart(tmp_path: Path) -> None:
    tensors = base_tensors()
    name = NORM
    with Publisher(str(tmp_path), run_id="a", base=BASE) as publisher:
        flip(tensors[name], 0)
        publisher.publish(tensors).wait(WAIT_S)
        flip(tensors[name], 1)
        publisher.publish(tensors).wait(WAIT_S)
        with publisher.fork("b", from_ref=Ref("a", 1)) as forked:
            flip(tensors[name], 1)
            flip(tensors[name], 2)
            assert forked.publish(tensors).wait(WAIT_S).ref == Ref("b", 2)
            with forked.fork("c") as again:
                flip(tensors[name], 3)
                assert again.publish(tensors).wait(WAIT_S).ref == Ref("c", 3)
        with pytest.raises(Conflict):
            publisher.publish(tensors).wait(WAIT_S)
    with Publisher(str(tmp_path), run_id="c", base=BASE) as publisher:
        assert publisher.claim() == Ref("c", 3)
        assert publisher.publish({}, version=4).wait(WAIT_S).kind is Kind.DELTA
        assert publisher.publish({}, anchor=True).wait(WAIT_S).ref == Ref("c", 5)
    assert state_of(open_store(str(tmp_path)), Ref("c", 5)) == as_bytes(tensors)


async def test_forking_from_nothing_is_refused(tmp_path: Path) -> None:
    store: Store = open_store(str(tmp_path))
    for origin in ("pointer", "x/weight_v000003"):
        publisher = Publisher(store, run_id="b", fork_from=origin)
        with pytest.raises((InvalidInput, Unavailable)):
            publisher.claim()
        publisher.close()
    assert await load_run(store, "b") is None


def test_torch_tensors_of_every_kind_are_published(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors: dict[str, Any] = {
        "bf16": torch.randn(8, 16).bfloat16(),
        "fp8": torch.randn(4, 8).to(torch.float8_e4m3fn),
        "view": torch.randn(6, 6).t(),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "scalar": torch.tensor(1.5),
    }

    def raw() -> dict[str, bytes]:
        return {
            name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            for name, tensor in tensors.items()
        }

    with Publisher(str(tmp_path), run_id="a", anchor_ratio=100.0) as publisher:
        publisher.publish(tensors).wait(WAIT_S)
        with torch.no_grad():
            tensors["bf16"][0, 0] += 1
            tensors["parameter"] += 1
        want = raw()
        publication = publisher.publish(tensors)
        with torch.no_grad():
            tensors["bf16"].fill_(9)
            tensors["parameter"].fill_(9)
        assert publication.wait(WAIT_S).changed == 2
    assert state_of(open_store(str(tmp_path)), Ref("a", 2)) == want


def test_a_base_that_is_no_checkpoint(tmp_path: Path) -> None:
    with (
        Publisher(str(tmp_path / "store"), run_id="a", base=tmp_path) as publisher,
        pytest.raises(InvalidInput, match="not a checkpoint"),
    ):
        publisher.claim()
