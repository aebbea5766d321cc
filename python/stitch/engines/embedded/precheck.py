"""Refuses a model directory before torch is loaded: a wrong path is known in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from stitch.errors import InvalidInput, Unsupported
from stitch.format.checkpoint import Checkpoint

__all__ = ["ARCHITECTURES", "check_model_directory"]

# Decoder-only models whose attention is plain causal softmax and whose checkpoint names are
# their parameter names.
ARCHITECTURES: Final = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def check_model_directory(directory: Path) -> str:
    """Check that config and tensors are there and of a kind this engine runs.

    Returns: the architecture.
    Raises: InvalidInput if the directory is no checkpoint; Unsupported for an architecture or
        attention variant this engine lacks; CorruptData for damaged shards.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise InvalidInput(f"{directory} has no config.json; give a Hugging Face checkpoint")
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise InvalidInput(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidInput(f"{path} is not a JSON object")
    architecture = _check_kind(directory, config)
    Checkpoint.open(directory).close()
    return architecture


def _check_kind(directory: Path, config: dict[str, Any]) -> str:
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else "(none)"
    if architecture not in ARCHITECTURES:
        raise Unsupported(
            f"{directory} is a {architecture}; the embedded engine runs {', '.join(ARCHITECTURES)}"
        )
    kinds = config.get("layer_types") or []
    if config.get("use_sliding_window") or any(kind != "full_attention" for kind in kinds):
        raise Unsupported(f"{directory} uses sliding-window attention, which this engine lacks")
    if config.get("quantization_config") is not None:
        raise Unsupported(f"{directory} is quantized; the embedded engine runs BF16, F16 and F32")
    return architecture
