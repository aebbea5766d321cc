"""Roll back to older bytes under a new, higher version, and prove it with a pinned request.

Run: python cookbook/rollback.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import stitch
from stitch.engines.embedded.tiny import write_tiny_model
from stitch.format.checkpoint import Checkpoint
from stitch.format.write import RawTensor

GREEDY = {"max_new_tokens": 16, "temperature": 0.0}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch) / "base"
        write_tiny_model(base, seed=3, hidden_size=64, layers=2)
        store = f"file://{scratch}/store"
        with (
            stitch.LocalPool(base, store=store, replicas=1, run_id="undo") as pool,
            stitch.Publisher(store, run_id="undo", base=base, pool=pool.pool) as publisher,
            stitch.Client(pool.url) as client,
        ):
            before = client.generate("once upon", constraint=stitch.exactly(0), sampling=GREEDY)
            checkpoint = Checkpoint.open(base)
            spoilt = {}
            for name, tensor in checkpoint.tensors.items():
                data = np.array(checkpoint.view(name))
                data.view(np.uint16)[::3] ^= 0x40  # a step that ruins the policy
                spoilt[name] = RawTensor(name, tensor.dtype, tensor.shape, data.data)
            publisher.publish(spoilt).wait()
            worse = client.generate("once upon", constraint=stitch.at_least(1), sampling=GREEDY)
            back = publisher.rollback(0).wait()
            again = client.generate(
                "once upon", constraint=stitch.exactly(back.ref.version), sampling=GREEDY
            )
            same = before.output_ids == again.output_ids
            print(f"version 0 and {again.version_start} agree: {same}")
            print(f"version 1 differs: {before.output_ids != worse.output_ids}")


if __name__ == "__main__":
    main()
