"""One attempt at a version in a LocalStore: a hidden directory beside the version it becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from stitch.errors import Conflict, InvalidInput
from stitch.stores.base import INDEX_NAME, Sealed
from stitch.stores.keys import check_name

if TYPE_CHECKING:
    from stitch.stores.local import LocalStore

__all__ = ["LocalStaging"]

Buffer = bytes | bytearray | memoryview


class LocalStaging:
    """One attempt in a hidden directory beside the version it will become."""

    def __init__(
        self,
        store: LocalStore,
        prefix: str,
        staging: Path,
        final: Path,
        release: Callable[[], None],
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._staging = staging
        self._final = final
        self._release: Callable[[], None] | None = release

    async def put(self, name: str, chunks: Iterable[Buffer]) -> int:
        """Write and sync one file; its name becomes durable at the seal."""
        path = self._staging / check_name(name)
        if name == INDEX_NAME:
            raise InvalidInput(f"{INDEX_NAME} is written by the seal alone", param="name")
        self._check_open()

        def work() -> int:
            try:
                return self._store.durable.write_file(path, chunks)
            except FileExistsError as error:
                raise Conflict(f"this attempt already wrote {name}", file=name) from error

        return await self._store.run(work)

    async def seal(self, index: bytes) -> Sealed:
        """Index last, sync the directory, rename it into place, sync the parent."""
        store = self._store
        if self._release is None and await store.confirm(self._prefix):
            return Sealed(self._prefix, False)
        self._check_open()

        def work() -> bool:
            sealed_index = self._final / INDEX_NAME
            if not store.files.exists(sealed_index):
                if store.files.exists(self._staging / INDEX_NAME):
                    store.files.unlink(self._staging / INDEX_NAME)  # an earlier try failed
                store.durable.write_file(self._staging / INDEX_NAME, [index])
            try:
                return store.durable.seal_directory(self._staging, self._final, sealed_index)
            except FileExistsError as error:
                raise Conflict(
                    f"{self._final} holds files without an index, written by somebody else; "
                    "move it away, or fork the run",
                    prefix=self._prefix,
                ) from error

        created = await store.run(work)
        if created:
            self._finish()
        else:
            await self.abandon()
        return Sealed(self._prefix, created)

    async def abandon(self) -> None:
        """Remove the staging directory, if this attempt still has one."""
        if self._release is None:
            return
        await self._store.run(lambda: self._store.files.remove_tree(self._staging))
        self._finish()

    async def leave(self) -> None:
        """Give up this process's lock and touch nothing."""
        self._finish()

    def _check_open(self) -> None:
        if self._release is None:
            raise Conflict(f"the attempt at {self._prefix} has ended", prefix=self._prefix)

    def _finish(self) -> None:
        if self._release is not None:
            self._release()
            self._release = None
