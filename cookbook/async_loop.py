"""An asynchronous loop in forty lines: rollouts of bounded lag while new versions are published.

Run: python cookbook/async_loop.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import stitch
from stitch.engines.embedded.tiny import write_tiny_model
from stitch.format.checkpoint import Checkpoint
from stitch.format.write import RawTensor
from stitch.rl import staleness


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch) / "base"
        write_tiny_model(base, seed=0, hidden_size=64, layers=2)
        store = f"file://{scratch}/store"
        with (
            stitch.LocalPool(base, store=store, replicas=2, run_id="loop") as pool,
            stitch.Publisher(store, run_id="loop", base=base, pool=pool.pool) as publisher,
            stitch.Client(pool.url) as client,
        ):
            checkpoint = Checkpoint.open(base)
            weights = {name: np.array(checkpoint.view(name)) for name in checkpoint.tensors}
            rng = np.random.default_rng(0)
            for newest in range(5):
                done = client.generate(
                    "the answer is",
                    # One behind at most. stitch.lag(1) counts from what the gateway has heard.
                    constraint=stitch.at_least(max(0, newest - 1)),
                    sampling={"max_new_tokens": 12},
                    return_logprob=True,
                )
                # A stand-in for the optimizer: flip the lowest mantissa bit of a few elements.
                for data in weights.values():
                    elements = data.view(np.uint16)
                    chosen = rng.integers(0, elements.size, max(1, elements.size // 200))
                    elements[chosen] ^= 1
                tensors = {
                    name: RawTensor(name, t.dtype, t.shape, weights[name].data)
                    for name, t in checkpoint.tensors.items()
                }
                published = publisher.publish(tensors).wait()
                ages = staleness(done.spans, published.ref)
                spans = [(span.ref.version, span.start, span.end) for span in done.spans]
                print(f"published {published.ref}; spans {spans}; token ages {sorted(set(ages))}")
            live = publisher.wait_live(published.ref.version, replicas=2, timeout=30)
            print(f"live on {len(live.live)} replicas")


if __name__ == "__main__":
    main()
