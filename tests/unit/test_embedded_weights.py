"""Live weights: exact bits in and out, ties, and what does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")
pytest.importorskip("transformers", reason="the engine's extra is not installed")

from stitch.engines.embedded.kv import PagePool  # noqa: E402
from stitch.engines.embedded.model import LoadedModel, load_model  # noqa: E402
from stitch.engines.embedded.ragged import Stretch  # noqa: E402
from stitch.engines.embedded.runner import Runner  # noqa: E402
from stitch.engines.embedded.text import TextCodec, TextStream  # noqa: E402
from stitch.engines.embedded.tiny import write_tiny_model  # noqa: E402
from stitch.engines.embedded.weights import Mismatch, widen  # noqa: E402
from stitch.errors import CorruptData, InvalidInput, Unsupported  # noqa: E402
from stitch.format.checkpoint import Checkpoint  # noqa: E402


def _write(directory: Path, **options: Any) -> Path:
    sizes = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "init_std": 0.3}
    write_tiny_model(directory, **{**sizes, **options})
    return directory


def _load(directory: Path, dtype: Any = None) -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(directory, compute_dtype=dtype or torch.float32)


def test_every_bfloat16_survives_widening_nans_included() -> None:
    every = np.arange(2**16, dtype="<u2")
    wide = widen(every.tobytes(), "BF16", torch.float32).numpy().view(np.uint32)
    assert np.array_equal(wide >> 16, every)
    assert not (wide & 0xFFFF).any()


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_live_sums_are_the_checkpoints(
    tmp_path: Path, architecture: str, tied: bool, compute: str
) -> None:
    path = _write(tmp_path / "m", architecture=architecture, tie_embeddings=tied)
    model = _load(path, getattr(torch, compute))
    with Checkpoint.open(path) as checkpoint:
        assert model.weights.checksums() == checkpoint.checksums()
    assert model.weights.aliases == (
        {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    )
    pool = PagePool(pages=64, layers=model.layers, kv_heads=model.kv_heads, head_dim=model.head_dim)
    runner = Runner(model, pool)
    assert runner.batch_invariant
    if compute == "float32":
        _compare_with_plain_forward(path, runner, pool)


def _compare_with_plain_forward(path: Path, runner: Runner, pool: PagePool) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = [(7 * i) % 250 for i in range(150)]
    with torch.no_grad():
        expected = plain(torch.tensor([tokens])).logits[0].numpy()
    pages = [page for page in (pool.take() for _ in range(10)) if page is not None]
    found = runner.forward([Stretch(tokens, 0, pages)], [range(150)])
    assert np.abs(found - expected).max() < 1e-4


def test_bits_that_no_bfloat16_widens_to_are_reported(tmp_path: Path) -> None:
    model = _load(_write(tmp_path / "m"))
    name = "model.norm.weight"
    with torch.no_grad():
        dict(model.module.named_parameters())[name][3] = 1.0000001
    with pytest.raises(CorruptData) as caught:
        model.weights.checksums([name])
    assert name in caught.value.message


def test_float32_checkpoints_need_float32_compute(tmp_path: Path) -> None:
    path = _write(tmp_path / "m", dtype="float32")
    model = _load(path)
    with Checkpoint.open(path) as checkpoint:
        assert model.weights.checksums() == checkpoint.checksums()
    with pytest.raises(Mismatch):
        _load(path, torch.bfloat16)


def test_ties_and_unknown_names(tmp_path: Path) -> None:
    weights = _load(_write(tmp_path / "m", tie_embeddings=True)).weights
    embedding = weights.tensors["model.embed_tokens.weight"]
    assert weights.canonical("lm_head.weight", "BF16", embedding.shape) == embedding
    assert weights.twins("lm_head.weight") == ["model.embed_tokens.weight"]
    for name, dtype, shape in (
        ("mtp.lm_head.weight", "BF16", embedding.shape),
        ("lm_head.weight", "F16", embedding.shape),
        ("lm_head.weight", "BF16", embedding.shape[::-1]),
    ):
        with pytest.raises(Mismatch):
            weights.canonical(name, dtype, shape)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, Unsupported),
        ({"quantization_config": {"quant_method": "fp8"}}, Unsupported),
        ({"intermediate_size": 48}, Mismatch),
        ({"num_hidden_layers": 2}, InvalidInput),
        ({"num_hidden_layers": 0}, Unsupported),
        ({"model_type": "no-such-model"}, InvalidInput),
    ],
)
def test_a_config_of_another_model_is_refused(
    tmp_path: Path, change: dict[str, Any], error: type[Exception]
) -> None:
    path = _write(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(error):
        _load(path)


def test_directories_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        _load(tmp_path)
    path = _write(tmp_path / "m")
    without = tmp_path / "without"
    shutil.copytree(path, without)
    (without / "tokenizer.json").unlink()
    with pytest.raises(InvalidInput):
        TextCodec(without)
    next(path.glob("*.safetensors")).unlink()
    with pytest.raises(InvalidInput):
        _load(path)


def test_streamed_text_never_shows_half_a_character(tmp_path: Path) -> None:
    codec = TextCodec(_write(tmp_path / "m"))
    text = "a€😀 stop here"
    ids = codec.encode(text)
    stream = TextStream(codec, skip_special_tokens=True, stops=["stop"])
    shown = []
    for token in ids:
        stream.push(token)
        shown.append(stream.text[: stream.settled_length])
        assert "\N{REPLACEMENT CHARACTER}" not in stream.text
        assert text.startswith(stream.text)
    assert not any(s.endswith(("s", "st", "sto")) for s in shown[: text.index("stop") + 8])
    assert stream.find_stop(["here", "stop"], 0) == (text.index("stop"), "stop")
    stream.finish()
    assert stream.text == text
    half = TextStream(codec, skip_special_tokens=True, stops=[])
    half.push(codec.encode("€")[0])
    assert half.text == ""
    half.finish()
    assert half.text == "\N{REPLACEMENT CHARACTER}"
