"""Tiny checkpoints: deterministic, complete, and refused where sizes do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stitch.cli import main
from stitch.engines.embedded.tiny import write_tiny_model
from stitch.errors import InvalidInput


def _bytes(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_equal_arguments_give_equal_bytes_and_seeds_differ(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_tiny_model(tmp_path / name, seed=seed, hidden_size=32, layers=1)
    assert _bytes(tmp_path / "a") == _bytes(tmp_path / "b")
    assert _bytes(tmp_path / "a") != _bytes(tmp_path / "c")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_index_names_every_tensor(tmp_path: Path, architecture: str, tied: bool) -> None:
    made = write_tiny_model(
        tmp_path / "m",
        hidden_size=32,
        layers=2,
        architecture=architecture,  # type: ignore[arg-type]
        tie_embeddings=tied,
        vocab_size=300,
    )
    index = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())
    config = json.loads((tmp_path / "m/config.json").read_text())
    assert len(index["weight_map"]) == made.tensors
    assert ("lm_head.weight" in index["weight_map"]) is not tied
    assert config["vocab_size"] == 300
    assert index["metadata"]["total_size"] == 2 * made.parameters
    biased = "model.layers.0.self_attn.q_proj.bias" in index["weight_map"]
    assert biased is (architecture == "qwen2")


def test_command_writes_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "m"
    arguments = ["init-model", str(target), "--hidden", "32", "--layers", "1", "--json"]
    assert main([*arguments, "--vocab", "chars:0123+"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["vocab_size"] == 16
    assert report["eos_token_id"] == 7
    assert main(arguments) == 2
    assert "not an empty directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value"),
    [("heads", 3), ("kv_heads", 3), ("layers", 0), ("vocab_size", 10), ("vocab", "words")],
)
def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        write_tiny_model(tmp_path / "m", **{field: value})  # type: ignore[arg-type]
    assert field in caught.value.message
    assert not (tmp_path / "m").exists()
