"""The demo's policy network: a Llama of about two million parameters, made and kept locally.

Checkpoints are bf16; every forward pass, in engine, learner and label check alike, computes in
fp32 on the exact widening, so log-probabilities agree to rounding noise.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from stitch.demo import task
from stitch.rl.trajectory import Trajectory

__all__ = ["load_model", "load_tensors", "make_checkpoint", "output_logprobs"]

# transformers renamed it, and warns in the middle of the live view about the old name
_CACHE_ARGUMENT: Final = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)


def make_checkpoint(directory: Path, *, seed: int) -> None:
    """Write a randomly initialised bf16 checkpoint, with config and tokenizer, to `directory`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(task.VOCABULARY),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=task.BOS,
        eos_token_id=task.EOS,
        pad_token_id=task.PAD,
    )
    disable_progress_bar()
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    _write_tokenizer(directory)


def load_model(directory: Path) -> LlamaForCausalLM:
    """The checkpoint in fp32, in evaluation mode (the network has no dropout)."""
    disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def load_tensors(model: LlamaForCausalLM, tensors: Mapping[str, torch.Tensor]) -> None:
    """Overwrite parameters by name with the widening of `tensors`. Every name must exist."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def output_logprobs(
    model: LlamaForCausalLM, batch: Sequence[Trajectory]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of each trajectory's output, and each position's whole distribution.

    Prompts that trajectories share are computed once, which about halves the work. All prompts
    must be of one length, and all outputs. Differentiable.

    Returns: `(batch, output)` and `(batch, output, vocabulary)`, fp32, in nats.
    """
    distinct: dict[tuple[int, ...], int] = {}
    rows = [distinct.setdefault(t.prompt_ids, len(distinct)) for t in batch]
    prompts, outputs = torch.tensor([*distinct]), torch.tensor([t.output_ids for t in batch])
    index = torch.tensor(rows)
    cache = DynamicCache(config=model.config)
    cached: dict[str, Any] = {_CACHE_ARGUMENT: cache, "use_cache": True}
    first = model(input_ids=prompts, logits_to_keep=1, **cached).logits.index_select(0, index)
    cache.batch_select_indices(index)
    rest = model(input_ids=outputs[:, :-1], **cached).logits
    every = torch.cat([first, rest], dim=1).float().log_softmax(dim=-1)
    return every.gather(2, outputs.unsqueeze(-1)).squeeze(-1), every


def _write_tokenizer(directory: Path) -> None:
    vocabulary = {text: number for number, text in enumerate(task.VOCABULARY)}
    special = [
        {
            "id": vocabulary[text],
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for text in ("<bos>", "<sep>", "<eos>", "<pad>")
    ]
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated",
                          "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<x>"},
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<x>",
        "model_max_length": 128,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(facts))
