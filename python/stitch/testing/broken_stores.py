"""Stores that break one promise each, and the case of the suite that catches each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from stitch.stores.base import INDEX_NAME, ObjectInfo, PointerRead, Sealed, SwapResult, Won
from stitch.testing import store_suite as suite
from stitch.testing.memory_store import Buffer, MemoryStaging, MemoryStore
from stitch.testing.store_suite import StoreCase

__all__ = ["BROKEN_STORES"]


class SwapWithoutCompare(MemoryStore):
    """The last writer wins."""

    async def swap_pointer(self, expect: str | None, text: str) -> SwapResult:
        return await super().swap_pointer((await self.read_pointer()).token, text)


class TokenReuse(MemoryStore):
    """The token is the text's length."""

    async def swap_pointer(self, expect: str | None, text: str) -> SwapResult:
        result = await super().swap_pointer(expect, text)
        if isinstance(result, Won):
            self.cells.pointer = (text, str(len(text)))
            return Won(str(len(text)))
        return result


class RewindingRead(MemoryStore):
    """A client keeps what it read first, as a stale mount does."""

    _seen: PointerRead | None = None

    async def read_pointer(self) -> PointerRead:
        found = await super().read_pointer()
        if self._seen is None or self._seen.token is None:
            self._seen = found
        return self._seen


class WonIsNotVisible(MemoryStore):
    """Won comes back before the pointer is written."""

    async def swap_pointer(self, expect: str | None, text: str) -> SwapResult:
        before = self.cells.pointer
        result = await super().swap_pointer(expect, text)
        if isinstance(result, Won):
            self.cells.pointer = before
        return result


class OverwriteOnCreate(MemoryStore):
    """create replaces."""

    async def create(self, key: str, data: bytes) -> bool:
        taken = key in self.cells.objects
        self.cells.objects.pop(key, None)
        await super().create(key, data)
        return not taken


class _OtherStaging(MemoryStore):
    staging: type[MemoryStaging] = MemoryStaging

    async def begin(self, prefix: str, *, attempt: str) -> MemoryStaging:
        await super().begin(prefix, attempt=attempt)
        return self.staging(self, prefix, attempt)


class _VisibleStaging(MemoryStaging):
    async def put(self, name: str, chunks: Iterable[Buffer]) -> int:
        size = await super().put(name, chunks)
        files = self.files
        assert files is not None
        self.store.put_object(f"{self.prefix}/{name}", files[name])
        return size


class VisibleBeforeSealed(_OtherStaging):
    """put writes under the final key."""

    staging = _VisibleStaging


class _OverSealing(MemoryStaging):
    async def seal(self, index: bytes) -> Sealed:
        self.store.cells.objects.pop(f"{self.prefix}/{INDEX_NAME}", None)
        return await super().seal(index)


class SealOverSealed(_OtherStaging):
    """A second seal replaces the first."""

    staging = _OverSealing


class _PartialStaging(MemoryStaging):
    async def put(self, name: str, chunks: Iterable[Buffer]) -> int:
        parts = [bytes(chunk) for chunk in chunks]
        await super().put(name, parts[:-2] or parts)
        return sum(map(len, parts))


class PartialPut(_OtherStaging):
    """Chunks are lost, and put claims them."""

    staging = _PartialStaging


class _MixedSeal(MemoryStaging):
    async def seal(self, index: bytes) -> Sealed:
        files = self.files
        for (prefix, _), others in list(self.store.cells.staged.items()):
            if prefix == self.prefix and files is not None:
                files.update(others)
        return await super().seal(index)


class OrphansInSeal(_OtherStaging):
    """Another attempt's files come along."""

    staging = _MixedSeal


class _PrivateStaging(MemoryStaging):
    def __init__(self, store: MemoryStore, prefix: str, attempt: str) -> None:
        super().__init__(store, prefix, f"{attempt}x{id(store)}")
        store.cells.staged.setdefault((prefix, self.attempt), {})


class RanksApart(_OtherStaging):
    """Two clients of one attempt do not meet."""

    staging = _PrivateStaging


class ListShowsStaging(MemoryStore):
    """Unfinished attempts are listed."""

    async def list(self, prefix: str) -> Sequence[str]:
        staged = [f"{where}/{name}" for (where, _), fs in self.cells.staged.items() for name in fs]
        return sorted([*await super().list(prefix), *staged])


class IgnoresToken(MemoryStore):
    """read_into never looks at expect_token."""

    async def read_into(self, key: str, offset: int, buffer: memoryview, **_: Any) -> int:
        return await super().read_into(key, offset, buffer)


class LostLease(MemoryStore):
    """Writing one lease drops the others."""

    async def write_lease(self, name: str, data: bytes) -> None:
        self.cells.leases.clear()
        await super().write_lease(name, data)


class DeletesIndex(MemoryStore):
    """An index can be deleted, and the name sealed again."""

    async def delete(self, key: str) -> None:
        self.cells.objects.pop(key, None)


class PrefixList(MemoryStore):
    """list compares text, not folders."""

    async def list(self, prefix: str) -> Sequence[str]:
        return sorted(key for key in self.cells.objects if key.startswith(prefix))


class StatOfAnything(MemoryStore):
    """The token names the size only."""

    async def stat(self, key: str) -> ObjectInfo | None:
        found = await super().stat(key)
        return None if found is None else ObjectInfo(found.size, str(found.size))

    async def read_into(
        self, key: str, offset: int, buffer: memoryview, *, expect_token: str | None = None
    ) -> int:
        found = await self.stat(key)
        if expect_token is not None and found is not None and found.token == expect_token:
            expect_token = None
        return await super().read_into(key, offset, buffer, expect_token=expect_token)


# Each broken store and the case that must fail on it.
BROKEN_STORES: Final[tuple[tuple[type[MemoryStore], StoreCase], ...]] = (
    (SwapWithoutCompare, suite.swap_compares),
    (TokenReuse, suite.tokens_are_not_used_again),
    (RewindingRead, suite.pointer_never_rewinds_for_a_reader),
    (WonIsNotVisible, suite.swap_is_visible_and_names_its_state),
    (OverwriteOnCreate, suite.create_is_create_only),
    (VisibleBeforeSealed, suite.nothing_is_visible_before_the_seal),
    (SealOverSealed, suite.seal_is_create_only),
    (PartialPut, suite.seal_shows_all_files_whole),
    (OrphansInSeal, suite.one_of_two_open_attempts_seals),
    (RanksApart, suite.ranks_share_an_attempt),
    (ListShowsStaging, suite.nothing_is_visible_before_the_seal),
    (IgnoresToken, suite.read_into_checks_the_token),
    (LostLease, suite.leases_are_kept_and_replaced),
    (DeletesIndex, suite.an_index_is_never_deleted),
    (PrefixList, suite.list_is_by_folder),
    (StatOfAnything, suite.read_into_checks_the_token),
)
