"""One forward pass over stretches of several requests, and the proof that mates do not matter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stitch.engines.embedded.kv import PAGE_TOKENS, PagePool
from stitch.engines.embedded.model import LoadedModel
from stitch.engines.embedded.ragged import ROW_TILE, Stretch, build_batch

__all__ = ["Runner"]

Array = np.ndarray[Any, Any]


class Runner:
    """Runs the model. All calls come from the scheduler thread.

    batch_invariant: whether the boot probe found equal bits alone and in company.
    """

    def __init__(self, model: LoadedModel, pool: PagePool) -> None:
        self._model = model
        self._body = model.module.get_decoder()
        self._head = model.module.get_output_embeddings()
        self.pool = pool
        self.batch_invariant = self._prove()

    def forward(self, stretches: Sequence[Stretch], wanted: Sequence[Sequence[int]]) -> Array:
        """Compute the stretches' keys and values, and logits for chosen tokens.

        Args:
            wanted: per stretch, offsets into its tokens whose logits are needed.
        Returns: float32 (sum of wanted, vocab), in order.
        """
        with torch.inference_mode():
            batch = build_batch(stretches, self.pool)
            hidden = self._body(
                input_ids=batch.input_ids,
                position_ids=batch.positions,
                use_cache=False,
                ragged=batch,
            ).last_hidden_state[0]
            rows: list[int] = []
            first = 0
            for stretch, offsets in zip(stretches, wanted, strict=True):
                rows += [first + offset for offset in offsets]
                first += len(stretch.tokens)
            if not rows:
                return np.empty((0, self._model.vocab_size), np.float32)
            padded = rows + [rows[-1]] * (-len(rows) % ROW_TILE)
            logits = self._head(hidden[torch.tensor(padded)])
            found: Array = logits[: len(rows)].float().numpy()
            return found

    def _prove(self) -> bool:
        """Compare prefill, decode and company bit for bit; fall back to fixed-shape products."""
        for tiled in (False, True):
            self._model.set_tiled(tiled)
            if self._probe():
                return True
        return False

    def _probe(self) -> bool:
        length = min(5 * PAGE_TOKENS, self._model.context_tokens_max)
        rng = np.random.Generator(np.random.PCG64(20261201))
        tokens = rng.integers(0, self._model.vocab_size, (3, length)).tolist()
        tables = [self._take(-(-length // PAGE_TOKENS)) for _ in tokens]
        try:
            alone = self.forward([Stretch(tokens[0], 0, tables[0])], [range(length)])
            # The same tokens in uneven pieces, each time between two other requests.
            cuts = [0, 1, 2, 5, length // 2, length - 1, length]
            parts = []
            for start, end in itertools.pairwise(cuts):
                if start >= end:
                    continue
                mates = [Stretch(tokens[i][:end], 0, tables[i]) for i in (1, 2)]
                middle = Stretch(tokens[0][start:end], start, tables[0])
                pieces = [mates[0], middle, mates[1]]
                parts.append(self.forward(pieces, [[], range(end - start), [0]])[:-1])
            return bool(np.array_equal(alone, np.concatenate(parts)))
        finally:
            for table in tables:
                self.pool.release(table)

    def _take(self, count: int) -> list[int]:
        pages = [self.pool.take() for _ in range(count)]
        assert None not in pages, "the pool holds at least three short requests"
        return [page for page in pages if page is not None]
