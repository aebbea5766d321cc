"""`stitch init-model`: write a tiny random model checkpoint."""

from __future__ import annotations

import argparse
import json
import sys

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("directory", help="directory to create")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (0)")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size (128)")
    parser.add_argument(
        "--intermediate", type=int, default=None, help="MLP size (2.5 times hidden)"
    )
    parser.add_argument("--layers", type=int, default=4, help="decoder layers (4)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (4)")
    parser.add_argument("--kv-heads", type=int, default=2, help="key/value heads (2)")
    parser.add_argument(
        "--vocab", default="bytes", help="`bytes`, or `chars:` and the characters (bytes)"
    )
    parser.add_argument(
        "--vocab-size", type=int, default=None, help="embedding rows (one per token)"
    )
    parser.add_argument("--tie-embeddings", action="store_true", help="no output head of its own")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16",
        help="as stored (bfloat16)",
    )  # fmt: skip
    parser.add_argument("--max-position", type=int, default=512, help="context length (512)")
    parser.add_argument(
        "--architecture", choices=("llama", "qwen2"), default="llama", help="layer type (llama)"
    )
    parser.add_argument("--shards", type=int, default=2, help="safetensors files (2)")
    parser.add_argument("--init-std", type=float, default=0.05, help="spread of the weights (0.05)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Write the checkpoint. Returns the exit code."""
    try:
        from stitch.engines.embedded.tiny import write_tiny_model

        written = write_tiny_model(
            options.directory,
            seed=options.seed,
            hidden_size=options.hidden,
            intermediate_size=options.intermediate,
            layers=options.layers,
            heads=options.heads,
            kv_heads=options.kv_heads,
            vocab=options.vocab,
            vocab_size=options.vocab_size,
            tie_embeddings=options.tie_embeddings,
            dtype=options.dtype,
            max_position=options.max_position,
            architecture=options.architecture,
            shards=options.shards,
            init_std=options.init_std,
        )
    except ModuleNotFoundError as error:
        print(
            f"stitch init-model: {error.name} is missing; install stitch-rl[torch]", file=sys.stderr
        )
        return 2
    except OSError as error:
        print(f"stitch init-model: cannot write {options.directory}: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(written.to_wire()))
    else:
        print(
            f"wrote {written.architecture} with {written.parameters:,} parameters "
            f"in {written.tensors} tensors to {written.directory}"
        )
    return 0
