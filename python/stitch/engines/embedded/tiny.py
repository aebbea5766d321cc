"""Tiny random checkpoints, written whole without torch: for the demo, tests and first steps.

The directory is an ordinary Hugging Face checkpoint: `config.json`, sharded safetensors with
an index, a byte-level (or one-token-per-character) tokenizer with a chat template, and
`generation_config.json`. Equal arguments give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from stitch.errors import InvalidInput

__all__ = ["SPECIAL_TOKENS", "TinyModel", "write_tiny_model"]

# Ids follow the ordinary tokens in this order.
SPECIAL_TOKENS: Final = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_ROW_MULTIPLE: Final = 16  # the embedding's rows are padded to this


@dataclass(frozen=True, slots=True)
class TinyModel:
    """What was written: sizes, and the ids a caller needs to talk to it."""

    directory: str
    architecture: str
    parameters: int
    tensors: int
    shards: int
    vocab_size: int
    eos_token_id: int
    pad_token_id: int

    def to_wire(self) -> dict[str, Any]:
        """The record as `stitch init-model --json` prints it."""
        return asdict(self)


def write_tiny_model(
    directory: Path | str,
    *,
    seed: int = 0,
    hidden_size: int = 128,
    intermediate_size: int | None = None,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: str = "bytes",
    vocab_size: int | None = None,
    tie_embeddings: bool = False,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    max_position: int = 512,
    architecture: Literal["llama", "qwen2"] = "llama",
    shards: int = 2,
    init_std: float = 0.05,
) -> TinyModel:
    """Write one checkpoint into `directory`, which is created and must be empty.

    Args:
        vocab: `bytes`, or `chars:` and the characters that get a token each.
        vocab_size: rows of the embedding; at least the tokens there are. None: that many,
            rounded up to a multiple of 16.
        intermediate_size: None means 2.5 times `hidden_size`, rounded down to a multiple of 16.
        init_std: standard deviation of every matrix; norms are one, biases zero.
    Raises: InvalidInput for sizes that do not fit together or a directory that is not empty.
    """
    target = _empty_directory(directory)
    inner = _default_inner(hidden_size) if intermediate_size is None else intermediate_size
    _check_sizes(hidden_size, inner, layers, heads, kv_heads, max_position, shards)
    tokens = _tokens(vocab)
    rows = _embedding_rows(vocab_size, len(tokens))
    target.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(target, tokens, max_position, bytewise=vocab == "bytes")
    config = _write_config(
        target,
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_position,
        vocab_size=rows,
        tie_word_embeddings=tie_embeddings,
        dtype=dtype,
        tokens=tokens,
    )
    shapes = dict(_shapes(config, biased=architecture == "qwen2"))
    count = min(shards, len(shapes))
    _write_shards(target, shapes, seed=seed, std=init_std, dtype=dtype, shard_count=count)
    return _summary(target, config, shapes, shards=count)


def _summary(
    target: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, shards: int
) -> TinyModel:
    return TinyModel(
        directory=str(target),
        architecture=config["architectures"][0],
        parameters=sum(int(np.prod(shape)) for shape in shapes.values()),
        tensors=len(shapes),
        shards=shards,
        vocab_size=config["vocab_size"],
        eos_token_id=config["eos_token_id"],
        pad_token_id=config["pad_token_id"],
    )


def _empty_directory(directory: Path | str) -> Path:
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidInput(f"{target} exists and is not an empty directory; choose another")
    return target


def _default_inner(hidden: int) -> int:
    return max(16, hidden * 5 // 2 // 16 * 16)


def _embedding_rows(wanted: int | None, tokens: int) -> int:
    if wanted is None:
        return -(-tokens // _ROW_MULTIPLE) * _ROW_MULTIPLE
    if wanted < tokens:
        raise InvalidInput(
            f"vocab_size {wanted} is below the {tokens} tokens there are", param="vocab_size"
        )
    return wanted


def _check_sizes(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    positions: int,
    shards: int,
) -> None:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "max_position": positions,
        "shards": shards,
    }
    for name, value in sizes.items():
        if value < 1:
            raise InvalidInput(f"{name} must be at least 1, not {value}", param=name)
    if hidden % (2 * heads):
        raise InvalidInput(
            f"hidden_size {hidden} must be a multiple of twice the {heads} heads",
            param="hidden_size",
        )
    if heads % kv_heads:
        raise InvalidInput(
            f"heads {heads} must be a multiple of kv_heads {kv_heads}", param="heads"
        )


def _write_config(
    target: Path, *, architecture: str, tokens: Mapping[str, int], dtype: str, **sizes: Any
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM" if architecture == "qwen2" else "LlamaForCausalLM"],
        "model_type": architecture,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": tokens["<|bos|>"],
        "eos_token_id": tokens["<|end|>"],
        "pad_token_id": tokens["<|pad|>"],
        "torch_dtype": dtype,
        "use_cache": True,
        **sizes,
    }
    _write_json(target / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(target / "generation_config.json", ids)
    return config


def _shapes(config: Mapping[str, Any], *, biased: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        for part, rows in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv)):
            yield f"{at}.self_attn.{part}.weight", (rows, hidden)
            if biased:
                yield f"{at}.self_attn.{part}.bias", (rows,)
        yield f"{at}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        yield f"{at}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{at}.mlp.up_proj.weight", (inner, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _values(name: str, shape: tuple[int, ...], seed: int, std: float) -> np.ndarray[Any, Any]:
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    if name.endswith(".bias"):
        return np.zeros(shape, np.float32)
    words = hashlib.blake2b(name.encode(), digest_size=16).digest()
    stream = np.random.Generator(np.random.PCG64([seed, *np.frombuffer(words, "<u4").tolist()]))
    return stream.standard_normal(shape, np.float32) * np.float32(std)


def _stored(values: np.ndarray[Any, Any], dtype: str) -> bytes:
    if dtype == "float32":
        return values.astype("<f4", copy=False).tobytes()
    bits = values.view(np.uint32)
    # Round to nearest, ties to even; the values are finite.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype("<u2").tobytes()


def _write_shards(
    target: Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    seed: int,
    std: float,
    dtype: str,
    shard_count: int,
) -> None:
    names = sorted(shapes)
    weight_map: dict[str, str] = {}
    total = 0
    for shard in range(shard_count):
        file = f"model-{shard + 1:05d}-of-{shard_count:05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        blobs = []
        end = 0
        for name in names[
            shard * len(names) // shard_count : (shard + 1) * len(names) // shard_count
        ]:
            data = _stored(_values(name, shapes[name], seed, std), dtype)
            header[name] = {
                "dtype": {"bfloat16": "BF16", "float32": "F32"}[dtype],
                "shape": list(shapes[name]),
                "data_offsets": [end, end + len(data)],
            }
            blobs.append(data)
            weight_map[name] = file
            end += len(data)
        total += end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (target / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.writelines(blobs)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(target / "model.safetensors.index.json", index)


def _tokens(vocab: str) -> dict[str, int]:
    if vocab == "bytes":
        from tokenizers import pre_tokenizers

        ordinary = sorted(pre_tokenizers.ByteLevel.alphabet())
    elif vocab.startswith("chars:") and len(vocab) > len("chars:"):
        ordinary = sorted(set(vocab.removeprefix("chars:")))
    else:
        raise InvalidInput(
            f"vocab {vocab!r} must be `bytes`, or `chars:` and the characters", param="vocab"
        )
    return {token: i for i, token in enumerate([*ordinary, *SPECIAL_TOKENS])}


def _write_tokenizer(
    target: Path, tokens: dict[str, int], max_position: int, *, bytewise: bool
) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[], fuse_unk=False))
    if bytewise:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(target / "tokenizer.json"))
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|end|>",
            "pad_token": "<|pad|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_position,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
