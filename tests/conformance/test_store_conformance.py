"""Every store keeps the protocol's promises; every broken store is caught by a named case."""

from __future__ import annotations

from pathlib import Path

import pytest

from stitch.env import Env
from stitch.stores import Store, open_store
from stitch.stores.local import LocalStore
from stitch.testing.broken_stores import BROKEN_STORES
from stitch.testing.files import CrashFiles
from stitch.testing.memory_store import Cells, MemoryStore
from stitch.testing.store_suite import STORE_CASES, StoreCase

each_case = pytest.mark.parametrize("case", STORE_CASES, ids=lambda case: case.__name__)


@each_case
async def test_local_store(case: StoreCase, tmp_path: Path) -> None:
    await case(lambda: open_store(f"file://{tmp_path}/made/later"))


@each_case
async def test_local_store_over_files_in_memory(case: StoreCase) -> None:
    env = Env(files=CrashFiles())

    def client() -> Store:
        return LocalStore(Path("/store"), env, mappable=False)

    await case(client)


@each_case
async def test_memory_store(case: StoreCase) -> None:
    cells = Cells()
    await case(lambda: MemoryStore(cells))


@pytest.mark.parametrize(
    ("broken", "case"), BROKEN_STORES, ids=[broken.__name__ for broken, _ in BROKEN_STORES]
)
async def test_broken_store_is_caught_by_its_case(
    broken: type[MemoryStore], case: StoreCase
) -> None:
    cells = Cells()
    with pytest.raises(AssertionError):
        await case(lambda: broken(cells))
