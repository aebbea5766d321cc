"""Key/value pages and the prefix cache over them. Owned by the scheduler thread.

A page holds the keys and values of `PAGE_TOKENS` consecutive tokens for all layers. A full
page may be shared by several requests and by the cache; it is written once and never again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch

__all__ = ["EMPTY_PAGE", "PAGE_TOKENS", "SCRATCH_PAGE", "PagePool", "PrefixCache", "chain_keys"]

PAGE_TOKENS: Final = 16
# Padding rows of a forward pass write here; nothing reads it.
SCRATCH_PAGE: Final = 0
# Stands for pages that a short request does not have; read under a mask, never written.
EMPTY_PAGE: Final = 1
_RESERVED: Final = 2


class PagePool:
    """Pages with reference counts.

    keys, values: per layer a tensor of shape (kv_heads, pages, PAGE_TOKENS, head_dim), float32.
    """

    def __init__(self, *, pages: int, layers: int, kv_heads: int, head_dim: int) -> None:
        shape = (layers, kv_heads, pages + _RESERVED, PAGE_TOKENS, head_dim)
        # Zeros, not garbage: a masked position contributes 0 * value, which must not be NaN.
        self.keys = torch.zeros(shape, dtype=torch.float32)
        self.values = torch.zeros(shape, dtype=torch.float32)
        self.page_count = pages
        self._free = list(range(pages + _RESERVED - 1, _RESERVED - 1, -1))
        self._references = [0] * (pages + _RESERVED)

    @property
    def free_count(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self) -> int | None:
        """One empty page with one reference, or None."""
        if not self._free:
            return None
        page = self._free.pop()
        self._references[page] = 1
        # A former owner may have left NaN or infinity behind the positions written anew.
        self.values[:, :, page].zero_()
        return page

    def share(self, page: int) -> None:
        """One more reference to a page in use."""
        assert self._references[page] > 0, f"page {page} is free"
        self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def references(self, page: int) -> int:
        """How many hold the page."""
        return self._references[page]


def chain_keys(root: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
    """One key per full page of `tokens`; each covers everything before it, and the root."""
    parent = root
    for start in range(0, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
        page = tokens[start : start + PAGE_TOKENS]
        parent = hashlib.blake2b(
            parent + b"".join(t.to_bytes(4, "little") for t in page), digest_size=16
        ).digest()
        yield parent


class PrefixCache:
    """Full pages by chain key, least recently used first. Holds one reference to each page."""

    def __init__(self, pool: PagePool, *, enabled: bool = True) -> None:
        self._pool = pool
        self._enabled = enabled
        self._pages: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    @staticmethod
    def root(generation: int, epoch: int | None, extra_key: str | None) -> bytes:
        """The chain's start: the weights in use, the activation epoch, the caller's key."""
        text = f"{generation}/{'-' if epoch is None else epoch}/"
        text += "-" if extra_key is None else f"+{extra_key}"
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def match(self, root: bytes, tokens: Sequence[int], tokens_max: int) -> list[int]:
        """Pages of the longest cached prefix within `tokens_max` tokens, one reference each."""
        found: list[int] = []
        for key in chain_keys(root, tokens[: max(0, tokens_max)]):
            page = self._pages.get(key)
            if page is None:
                break
            self._pages.move_to_end(key)
            self._pool.share(page)
            found.append(page)
        return found

    def insert(self, key: bytes, page: int) -> None:
        """Keep a full page. A key already cached keeps the page it has."""
        if self._enabled and key not in self._pages:
            self._pool.share(page)
            self._pages[key] = page

    def evict(self) -> bool:
        """Drop the least recently used page that only the cache holds. False if there is none."""
        for key, page in self._pages.items():
            if self._pool.references(page) == 1:
                del self._pages[key]
                self._pool.release([page])
                return True
        return False

    def clear(self) -> None:
        """Forget everything; pages that requests hold stay with them."""
        self._pool.release(self._pages.values())
        self._pages.clear()
