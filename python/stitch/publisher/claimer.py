"""Claiming and loading for all ranks of a publisher: rank 0 claims, the others follow."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from stitch.env import Env
from stitch.format.wire import RunRecord
from stitch.publisher.claim import ClaimRequest, claim
from stitch.publisher.lineage import Loader
from stitch.publisher.ranks import Ranks
from stitch.publisher.session import Session
from stitch.publisher.state import SealedState
from stitch.stores.base import Store
from stitch.types import Ref

__all__ = ["Claimer"]

T = TypeVar("T")


class Claimer:
    """Finds a publisher's place in the store. Belongs to the loop thread."""

    def __init__(
        self,
        store: Store,
        request: ClaimRequest,
        ranks: Ranks,
        env: Env,
        *,
        base: Path | None,
        cache_dir: Path | None,
        threads: int,
    ) -> None:
        self._store = store
        self._request = request
        self._ranks = ranks
        self._env = env
        self._base = base
        self._cache_dir = cache_dir
        self._threads = threads

    async def claim(self) -> Session:
        """Claim on rank 0, load the same state on the others. Collective.

        Raises: on every rank, what one of them failed with.
        """
        ranks = self._ranks
        session: Session | None = None
        error: Exception | None = None
        if ranks.rank == 0:
            try:
                session = await self._with_loader(
                    lambda loader: claim(self._store, self._request, loader, self._env)
                )
            except Exception as failure:
                error = failure  # rank boundary: the others wait for it
        if ranks.size > 1:
            told = (session.record, session.sealed.ref, session.sealed.known) if session else None
            told, error = await ranks.broadcast((told, error))
            if error is None and ranks.rank != 0:
                try:
                    session = await self._follow(*told)
                except Exception as failure:
                    error = failure
            errors = [found for found in await ranks.all_gather(error) if found is not None]
            error = errors[0] if errors else None
        if error is not None:
            raise error
        assert session is not None
        return session

    async def load(self, record: RunRecord, version: int) -> SealedState:
        """The verified state of one version."""
        return await self._with_loader(lambda loader: loader.load(record, version))

    async def _follow(self, record: RunRecord, ref: Ref, known: bool) -> Session:
        sealed = SealedState(ref, None, None, None, None)
        if known:
            sealed = await self.load(record, ref.version)
        return Session(self._store, record, sealed, ref, None)

    async def _with_loader(self, work: Callable[[Loader], Awaitable[T]]) -> T:
        scratch = None
        cache = self._cache_dir
        if cache is None and not self._store.capabilities.local_files:
            scratch = cache = Path(tempfile.mkdtemp(prefix="stitch-publisher-"))
        loader = Loader(
            self._store,
            self._base,
            cache if cache is not None else Path(tempfile.gettempdir()),
            self._env,
            self._threads,
            copy_base=self._ranks.size == 1,
        )
        try:
            return await work(loader)
        finally:
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)
