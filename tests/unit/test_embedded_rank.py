"""The rank's order book on tied weights, without a server."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")
pytest.importorskip("transformers", reason="the engine's extra is not installed")

from stitch.engines.base import RankOrder, RankReply, TensorSlice  # noqa: E402
from stitch.engines.embedded.model import load_model  # noqa: E402
from stitch.engines.embedded.rank import Rank  # noqa: E402
from stitch.engines.embedded.tiny import write_tiny_model  # noqa: E402
from stitch.format.checkpoint import Checkpoint  # noqa: E402
from stitch.types import Label  # noqa: E402

T = TypeVar("T")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class IdleEngine:
    """Paused, with nothing running; executes at once."""

    paused = True

    def __init__(self) -> None:
        self.label: Label | None = None
        self.changes = 0

    def call(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        return future

    def weights_changing(self) -> None:
        self.changes += 1
        self.label = None

    def set_label(self, label: Label | None) -> None:
        self.label = label


class Tied:
    """A tied model at version 1, and slices of versions 1 and 2."""

    def __init__(self, root: Path) -> None:
        sizes: dict[str, Any] = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1}
        for seed in (1, 2):
            write_tiny_model(root / f"v{seed}", seed=seed, tie_embeddings=True, **sizes)
        torch.set_num_threads(1)
        model = load_model(root / "v1", compute_dtype=torch.float32)
        self.engine = IdleEngine()
        self.rank = Rank(model.weights, self.engine)
        assert self.order("stage", 0).code == "refused", "unbound ranks take discard alone"
        assert self.order("discard", 0).ok
        self.old, self.new = (self._slices(root / f"v{seed}") for seed in (1, 2))

    @staticmethod
    def _slices(path: Path) -> dict[str, TensorSlice]:
        with Checkpoint.open(path) as checkpoint:
            sums = checkpoint.checksums()
            return {
                name: TensorSlice(
                    name,
                    str(t.path),
                    t.offset,
                    t.nbytes,
                    t.dtype,
                    tuple(t.shape),
                    sums[name].to_text(),
                )
                for name, t in checkpoint.tensors.items()
            }

    def order(self, op: Any, attempt: int = 1, **fields: Any) -> RankReply:
        return self.rank.obey(RankOrder("i", attempt, op, **fields))

    def sums(self) -> dict[str, str]:
        return dict(self.order("verify", scope="full").data["checksums"])


@pytest.fixture
def tied(tmp_path: Path) -> Tied:
    return Tied(tmp_path)


def test_a_declared_alias_may_come_along_and_is_written_once(tied: Tied) -> None:
    alias = replace(tied.new[EMBEDDING], name=HEAD)
    tensors = (alias, tied.new[EMBEDDING])
    undo = (tied.old[EMBEDDING],)
    for via in ("cpu", "disk"):
        attempt = 1 if via == "cpu" else 2
        assert tied.order("stage", attempt, tensors=tensors, undo_tensors=undo, via=via).ok
        assert tied.order("commit", attempt).ok
        changed = tied.order("verify", attempt).data["checksums"]
        assert changed == {HEAD: alias.checksum, EMBEDDING: alias.checksum}
        assert tied.order("undo", attempt).ok
        assert tied.order("verify", attempt, scope="full").data["checksums"] == {
            name: part.checksum for name, part in tied.old.items()
        }


def test_an_alias_alone_or_with_other_bytes_does_not_fit(tied: Tied) -> None:
    alias = replace(tied.new[EMBEDDING], name=HEAD)
    other = replace(tied.old[EMBEDDING], name=HEAD)
    for tensors in ((alias,), (other, tied.new[EMBEDDING])):
        assert tied.order("stage", tensors=tensors).code == "mismatch"
    undeclared = replace(alias, name="mtp.lm_head.weight")
    assert tied.order("stage", tensors=(tied.new[EMBEDDING], undeclared)).code == "mismatch"
    assert tied.engine.changes == 0


def test_undo_tensors_must_be_those_of_the_stage(tied: Tied) -> None:
    tensors = tuple(tied.new.values())
    assert tied.order("stage", tensors=tensors, undo_tensors=tuple(tied.old.values())[1:]).code == (
        "mismatch"
    )
    assert tied.order("stage", tensors=tensors).ok
    assert tied.order("commit").ok
    reply = tied.order("undo")
    assert reply.code == "refused"
    assert "without undo tensors" in reply.message
    assert tied.sums() == {name: part.checksum for name, part in tied.new.items()}


def test_an_unpaused_engine_is_never_written(tied: Tied) -> None:
    assert tied.order(
        "stage", tensors=tuple(tied.new.values()), undo_tensors=tuple(tied.old.values())
    ).ok
    tied.engine.paused = False
    assert tied.order("commit").code == "refused"
    assert tied.order("state").data["step"] == "staged"
    tied.engine.paused = True
    assert tied.order("commit").ok
    tied.engine.paused = False
    assert tied.order("undo").code == "refused"
    assert tied.order("state").data["step"] == "committed"
