"""Attention over a flat batch of tokens of many requests, independent of who shares the batch.

A query token's result depends on its own keys alone, bit for bit: every matrix product has a
fixed inner shape (query tiles of `TILE_QUERIES`, key blocks of `BLOCK_TOKENS`), blocks are
folded in order with a running maximum (online softmax, arXiv 1805.02867), and a masked key
adds exactly zero. So prefill in any chunking, decode, and any set of batch mates agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from stitch.engines.embedded.kv import EMPTY_PAGE, PAGE_TOKENS, SCRATCH_PAGE, PagePool

__all__ = [
    "ATTENTION_NAME",
    "ROW_TILE",
    "RaggedBatch",
    "Stretch",
    "build_batch",
    "ragged_attention",
]

ATTENTION_NAME: Final = "stitch_ragged"
ROW_TILE: Final = 16
TILE_QUERIES: Final = 4
BLOCK_TOKENS: Final = 64
_BLOCK_PAGES: Final = BLOCK_TOKENS // PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens of one request: ids, the first one's position, and the page table."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """One forward pass. `rows` counts flat tokens, padded to a multiple of ROW_TILE.

    Tiles are sorted by their number of key blocks, most first, so that block b concerns the
    first `block_tiles[b]` tiles. `masks[b]` is true where a key lies after the query:
    (1, tiles, 1, TILE_QUERIES, BLOCK_TOKENS).
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    write_pages: torch.Tensor
    write_slots: torch.Tensor
    tile_rows: torch.Tensor
    unpack: torch.Tensor
    block_tiles: tuple[int, ...]
    block_pages: tuple[torch.Tensor, ...]
    masks: tuple[torch.Tensor, ...]
    pool: PagePool


def build_batch(stretches: Sequence[Stretch], pool: PagePool) -> RaggedBatch:
    """Lay out the stretches one after the other. Each page table covers its last token."""
    ids: list[int] = []
    positions: list[int] = []
    pages: list[int] = []
    tiles: list[tuple[int, list[int], list[int], Sequence[int]]] = []
    for stretch in stretches:
        first_row = len(ids)
        count = len(stretch.tokens)
        ids += stretch.tokens
        span = range(stretch.start, stretch.start + count)
        positions += span
        pages += [stretch.pages[p // PAGE_TOKENS] for p in span]
        for at in range(0, count, TILE_QUERIES):
            rows = list(range(first_row + at, first_row + min(at + TILE_QUERIES, count)))
            places = [stretch.start + row - first_row for row in rows]
            tiles.append((places[-1] // BLOCK_TOKENS + 1, rows, places, stretch.pages))
    real = len(ids)
    padding = -real % ROW_TILE
    ids += [0] * padding
    positions += [0] * padding
    pages += [SCRATCH_PAGE] * padding
    tiles.sort(key=lambda tile: -tile[0])
    place = torch.tensor(positions)
    tile_rows, tile_places, unpack = _fill_tiles(tiles, rows=len(ids))
    blocks = tiles[0][0]
    counts = tuple(sum(tile[0] > b for tile in tiles) for b in range(blocks))
    key_at = torch.arange(BLOCK_TOKENS)
    return RaggedBatch(
        input_ids=torch.tensor([ids]),
        positions=place.unsqueeze(0),
        write_pages=torch.tensor(pages),
        write_slots=place % PAGE_TOKENS,
        tile_rows=tile_rows,
        unpack=unpack,
        block_tiles=counts,
        block_pages=tuple(_block_pages(tiles[: counts[b]], b) for b in range(blocks)),
        masks=tuple(
            (key_at + b * BLOCK_TOKENS > tile_places[: counts[b], :, None])[None, :, None]
            for b in range(blocks)
        ),
        pool=pool,
    )


def _fill_tiles(
    tiles: Sequence[tuple[int, list[int], list[int], Sequence[int]]], *, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row and position of each tile's queries, and where each row's result lies among them."""
    row_table: list[int] = []
    place_table: list[list[int]] = []
    unpack = [0] * rows
    for tile, (_, tile_rows, places, _) in enumerate(tiles):
        for lane, row in enumerate(tile_rows):
            unpack[row] = tile * TILE_QUERIES + lane
        spare = TILE_QUERIES - len(tile_rows)
        row_table += tile_rows + [tile_rows[-1]] * spare
        place_table.append(places + [places[-1]] * spare)
    return torch.tensor(row_table), torch.tensor(place_table), torch.tensor(unpack)


def _block_pages(
    tiles: Sequence[tuple[int, list[int], list[int], Sequence[int]]], block: int
) -> torch.Tensor:
    first = block * _BLOCK_PAGES
    table: list[int] = []
    for _, _, _, pages in tiles:
        held = list(pages[first : first + _BLOCK_PAGES])
        table += held + [EMPTY_PAGE] * (_BLOCK_PAGES - len(held))
    return torch.tensor(table)


def ragged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    ragged: RaggedBatch,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function registered with transformers.

    query (1, heads, rows, dim), key and value (1, kv_heads, rows, dim): writes the rows' keys
    and values into their pages, then attends. Returns (1, rows, heads, dim).
    """
    keys, values = ragged.pool.keys[module.layer_idx], ragged.pool.values[module.layer_idx]
    keys[:, ragged.write_pages, ragged.write_slots] = key[0].float()
    values[:, ragged.write_pages, ragged.write_slots] = value[0].float()
    heads, dim = query.shape[1], query.shape[3]
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    tiles = ragged.block_tiles[0]
    tile_shape = (kv_heads, group, tiles, TILE_QUERIES, dim)
    packed = query[0].float().index_select(1, ragged.tile_rows).view(tile_shape).transpose(1, 2)
    packed = (packed * scaling).reshape(kv_heads, tiles, group * TILE_QUERIES, dim)
    top = total = mixed = None
    for block, count in enumerate(ragged.block_tiles):
        chosen = ragged.block_pages[block]
        block_shape = (kv_heads * count, BLOCK_TOKENS, dim)
        block_keys = keys.index_select(1, chosen).view(block_shape)
        block_values = values.index_select(1, chosen).view(block_shape)
        queries = packed[:, :count].reshape(kv_heads * count, group * TILE_QUERIES, dim)
        scores = torch.bmm(queries, block_keys.transpose(1, 2))
        scores = scores.view(kv_heads, count, group, TILE_QUERIES, BLOCK_TOKENS)
        scores = scores.masked_fill(ragged.masks[block], float("-inf"))
        scores = scores.view(kv_heads, count, group * TILE_QUERIES, BLOCK_TOKENS)
        highest = scores.amax(-1, keepdim=True)
        if top is None or total is None or mixed is None:
            top = highest
            shares = torch.exp(scores - top)
            total = shares.sum(-1, keepdim=True)
            mixed = _weighted(shares, block_values, (kv_heads, count))
            continue
        raised = torch.maximum(top[:, :count], highest)
        kept = torch.exp(top[:, :count] - raised)
        shares = torch.exp(scores - raised)
        total[:, :count] = total[:, :count] * kept + shares.sum(-1, keepdim=True)
        added = _weighted(shares, block_values, (kv_heads, count))
        mixed[:, :count] = mixed[:, :count] * kept + added
        top[:, :count] = raised
    assert mixed is not None, "a batch has at least one key block"
    assert total is not None, "set together with mixed"
    result = (mixed / total).view(kv_heads, tiles, group, TILE_QUERIES, dim).transpose(1, 2)
    result = result.reshape(heads, tiles * TILE_QUERIES, dim).index_select(1, ragged.unpack)
    return result.transpose(0, 1).unsqueeze(0).to(query.dtype), None


def _weighted(
    shares: torch.Tensor, block_values: torch.Tensor, lead: tuple[int, int]
) -> torch.Tensor:
    flat = shares.view(lead[0] * lead[1], shares.shape[2], BLOCK_TOKENS)
    return torch.bmm(flat, block_values).view(*lead, shares.shape[2], block_values.shape[2])
