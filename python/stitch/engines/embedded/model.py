"""Loads a Hugging Face checkpoint directory into a transformers model made for ragged batches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from stitch.engines.embedded.precheck import check_model_directory
from stitch.engines.embedded.ragged import ATTENTION_NAME, ROW_TILE, ragged_attention
from stitch.engines.embedded.weights import LiveWeights
from stitch.errors import InvalidInput
from stitch.format.checkpoint import Checkpoint

__all__ = ["LoadedModel", "RowTiledLinear", "load_model"]


class RowTiledLinear(torch.nn.Linear):  # type: ignore[misc]
    """A linear layer that can be told to multiply ROW_TILE rows at a time.

    BLAS may sum in another order for another row count. Where the boot probe finds that,
    `tiled` makes every product the same shape.
    """

    tiled: bool = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input` (…, rows, features), rows a multiple of ROW_TILE."""
        if not self.tiled:
            return functional.linear(input, self.weight, self.bias)
        rows = input.reshape(-1, input.shape[-1])
        parts = [functional.linear(part, self.weight, self.bias) for part in rows.split(ROW_TILE)]
        return torch.cat(parts).view(*input.shape[:-1], -1)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, its weights by canonical name, and sizes the scheduler needs."""

    module: Any
    weights: LiveWeights
    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens_max: int
    eos_token_ids: frozenset[int]

    def set_tiled(self, tiled: bool) -> None:
        """Switch all linear layers to fixed-shape products, or back."""
        for layer in self.module.modules():
            if isinstance(layer, RowTiledLinear):
                layer.tiled = tiled


def load_model(directory: Path, *, compute_dtype: torch.dtype) -> LoadedModel:
    """Load config and weights; every tensor checked, widened exactly.

    Raises: InvalidInput if the directory is no checkpoint; Unsupported for an architecture,
        an attention variant or a dtype this engine does not run; CorruptData for damage.
    """
    architecture = check_model_directory(directory)
    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidInput(f"{directory}/config.json is not usable: {first}") from error
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, ragged_attention)
    with Checkpoint.open(directory) as checkpoint:
        with no_init_weights():
            module = AutoModelForCausalLM.from_config(
                config, dtype=compute_dtype, attn_implementation=ATTENTION_NAME
            )
        module.tie_weights()
        module.eval().requires_grad_(False)
        weights = LiveWeights(module, checkpoint, architecture)
    for layer in module.modules():
        if type(layer) is torch.nn.Linear:
            layer.__class__ = RowTiledLinear
    heads = config.num_attention_heads
    return LoadedModel(
        module=module,
        weights=weights,
        architecture=architecture,
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        context_tokens_max=config.max_position_embeddings,
        eos_token_ids=_eos_ids(directory, config),
    )


def _eos_ids(directory: Path, config: Any) -> frozenset[int]:
    found: set[int] = set()
    sources = [getattr(config, "eos_token_id", None)]
    generation = directory / "generation_config.json"
    if generation.is_file():
        try:
            sources.append(json.loads(generation.read_text("utf-8")).get("eos_token_id"))
        except (ValueError, AttributeError) as error:
            raise InvalidInput(f"{generation} is not a JSON object") from error
    for source in sources:
        found.update([source] if isinstance(source, int) else source or [])
    return frozenset(found)
