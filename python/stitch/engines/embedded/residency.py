"""Which key/value state is where: page tables of samples, and prefixes they share.

Owned by the scheduler thread. State is keyed by the weights in use (`generation`, which grows
at every write of live weights) and the activation epoch of the label.
"""

from __future__ import annotations

from stitch.engines.embedded.generation import Generation
from stitch.engines.embedded.kv import PAGE_TOKENS, PagePool, PrefixCache, chain_keys

__all__ = ["Residency"]


class Residency:
    """Pages of all samples. `generation` and `epoch` name the weights that new state is from."""

    def __init__(self, pool: PagePool, *, prefix_cache: bool) -> None:
        self.pool = pool
        self.cache = PrefixCache(pool, enabled=prefix_cache)
        self.generation = 0
        self.epoch: int | None = None
        self._caching = prefix_cache

    def weights_changing(self) -> None:
        """From here on new state is of other weights; no old prefix is found again."""
        self.generation += 1
        self.epoch = None
        self.cache.clear()

    def set_epoch(self, epoch: int | None) -> None:
        """A new activation epoch: old prefixes are never found again, so they end now."""
        self.epoch = epoch
        self.cache.clear()

    def load(self, sample: Generation) -> bool:
        """Give an empty sample the cached pages of its prefix. True at the sample's first time.

        The last token is always computed, and so is every prompt token whose logits are wanted.
        """
        limit = len(sample.tokens) - 1
        if sample.ask.logprob_start is not None:
            known = max(0, len(sample.input_logprobs) - 1)
            limit = min(limit, sample.ask.logprob_start + known)
        sample.pages = self.cache.match(self._root(sample), sample.tokens, limit)
        sample.computed = len(sample.pages) * PAGE_TOKENS
        if sample.cached_tokens is not None:
            return False
        sample.cached_tokens = sample.computed
        return True

    def extend(self, sample: Generation, tokens: int) -> bool:
        """Reserve pages for the first `tokens` tokens; False when none is left, even cached."""
        while len(sample.pages) * PAGE_TOKENS < tokens:
            page = self.pool.take()
            if page is not None:
                sample.pages.append(page)
            elif not self.cache.evict():
                return False
        return True

    def make_room(self, tokens: int) -> bool:
        """Evict until `tokens` tokens have free pages; False if they can't."""
        needed = -(-tokens // PAGE_TOKENS)
        while self.pool.free_count < needed:
            if not self.cache.evict():
                return False
        return True

    def keep(self, sample: Generation) -> None:
        """Share pages that just became full, unless their state is not the present weights'."""
        full = sample.computed // PAGE_TOKENS
        if sample.stale or not self._caching:
            return
        root = self._root(sample)
        if root != sample.chain_root or len(sample.chain) > full:
            sample.chain, sample.chain_root = [], root
        done = len(sample.chain)
        if full == done:
            return
        parent = sample.chain[-1] if sample.chain else root
        tail = sample.tokens[done * PAGE_TOKENS : full * PAGE_TOKENS]
        for index, key in enumerate(chain_keys(parent, tail), start=done):
            sample.chain.append(key)
            self.cache.insert(key, sample.pages[index])

    def drop(self, sample: Generation) -> None:
        """Give up all state of a sample."""
        self.pool.release(sample.drop_state())

    def _root(self, sample: Generation) -> bytes:
        return PrefixCache.root(self.generation, self.epoch, sample.ask.extra_key)
