"""Key/value pages and the prefix cache."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")

from stitch.engines.embedded.kv import (  # noqa: E402
    EMPTY_PAGE,
    PAGE_TOKENS,
    SCRATCH_PAGE,
    PagePool,
    PrefixCache,
    chain_keys,
)


def _pool(pages: int = 4) -> PagePool:
    return PagePool(pages=pages, layers=1, kv_heads=1, head_dim=2)


def test_pages_come_back_only_with_the_last_reference_and_empty() -> None:
    pool = _pool(2)
    first, second = pool.take(), pool.take()
    assert first is not None
    assert second is not None
    assert not {SCRATCH_PAGE, EMPTY_PAGE} & {first, second}
    assert pool.take() is None
    pool.values[:, :, first] = float("nan")
    pool.share(first)
    pool.release([first])
    assert pool.free_count == 0
    pool.release([first])
    assert pool.take() == first
    assert not pool.values[:, :, first].any()
    pool.release([second])
    with pytest.raises(AssertionError):
        pool.release([second])


def test_chain_keys_cover_all_before_them() -> None:
    tokens = list(range(3 * PAGE_TOKENS + 5))
    keys = list(chain_keys(b"root", tokens))
    assert len(keys) == 3
    changed = [99, *tokens[1:]]
    assert not set(keys) & set(chain_keys(b"root", changed))
    assert not set(keys) & set(chain_keys(b"other", tokens))
    assert list(chain_keys(keys[0], tokens[PAGE_TOKENS:])) == keys[1:]


def test_roots_tell_weights_epochs_and_keys_apart() -> None:
    roots = {
        PrefixCache.root(generation, epoch, key)
        for generation in (0, 1)
        for epoch in (None, 0, 1)
        for key in (None, "", "-", "a")
    }
    assert len(roots) == 24


def test_matches_are_shared_bounded_and_evicted_oldest_first() -> None:
    pool = _pool(3)
    cache = PrefixCache(pool)
    tokens = list(range(2 * PAGE_TOKENS))
    pages = [p for p in (pool.take(), pool.take()) if p is not None]
    for key, page in zip(chain_keys(b"r", tokens), pages, strict=True):
        cache.insert(key, page)
        cache.insert(key, page)
    assert cache.match(b"r", tokens, len(tokens) - 1) == pages[:1]
    assert cache.evict() is False, "both pages are in use"
    pool.release(pages)
    assert cache.evict() is True
    assert cache.match(b"r", tokens, len(tokens)) == pages[:1], "the later page went first"
    pool.release([pages[0], pages[0]])
    assert cache.match(b"x", tokens, len(tokens)) == []
    cache.clear()
    assert pool.free_count == 3


def test_a_disabled_cache_keeps_nothing() -> None:
    pool = _pool()
    cache = PrefixCache(pool, enabled=False)
    page = pool.take()
    assert page is not None
    cache.insert(b"k", page)
    assert len(cache) == 0
