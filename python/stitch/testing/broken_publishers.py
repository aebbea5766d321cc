"""Publishers that break one promise each, and the case of the suite that catches each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from stitch.errors import Conflict, StitchError
from stitch.format.records import version_prefix
from stitch.format.tensors import RawTensor
from stitch.publisher import Publication, Published, Publisher
from stitch.publisher.job import Job, Receipt
from stitch.publisher.pipeline import Pipeline
from stitch.publisher.plan import Offer, Plan, merge_offers
from stitch.publisher.session import Session
from stitch.publisher.state import SealedState, TensorState
from stitch.stores.base import INDEX_NAME, Staging
from stitch.testing import publisher_suite as suite
from stitch.testing.publisher_suite import PublisherCase
from stitch.types import Kind, Ref

__all__ = ["BROKEN_PUBLISHERS"]


class _PointsFirst(Pipeline):
    async def write_files(
        self, job: Job, plan: Plan, after: dict[str, TensorState], staging: Staging
    ) -> Receipt:
        await self.session.move_pointer(job.publication.ref)
        return await super().write_files(job, plan, after, staging)


class PointerBeforeSeal(Publisher):
    """The pointer moves before the files are written."""

    pipeline_class = _PointsFirst


class _Optimist(Pipeline):
    async def run(self, job: Job) -> Published:
        after = {**self.session.sealed.tensors, **job.layer.effective()}
        try:
            return await super().run(job)
        except StitchError:
            facts = {name: state.facts for name, state in after.items()}
            sealed = self.session.sealed
            self.session.sealed = SealedState(
                job.publication.ref, after, facts, sealed.model_digest, sealed.manifest_digest
            )
            job.layer.failed, job.layer.sealed = False, True
            raise


class BaselineFollowsUnsealed(Publisher):
    """What was encoded counts as published."""

    pipeline_class = _Optimist


class KeepsCallersBuffers(Publisher):
    """The tensors are kept as views instead of copies."""

    def _job(self, session: Session, view: Callable[[], Sequence[RawTensor]], *rest: Any) -> Job:
        raw = {tensor.name: tensor for tensor in view()}
        job = super()._job(session, view, *rest)
        job.layer.after = {
            name: replace(state, stored=memoryview(raw[name].data))
            for name, state in job.layer.after.items()
        }
        return job


class _Deaf(Pipeline):
    async def run(self, job: Job) -> Published:
        try:
            return await super().run(job)
        except Conflict:
            ref = job.publication.ref
            return Published(ref, Kind.DELTA, 0, 0, 0, 0.0, 0.0, "", "", True)


class SwallowsConflict(Publisher):
    """A lost pointer is a success."""

    pipeline_class = _Deaf


class _Changed(Pipeline):
    def _offer(self, job: Job, after: dict[str, TensorState]) -> Offer:
        offer = super()._offer(job, after)
        if not offer.needs_anchor:
            return offer
        given = {name: tensor for name, tensor in offer.tensors.items() if tensor.given}
        return replace(offer, tensors=given, replaces=True)


class AnchorOfChangedOnly(Publisher):
    """An anchor is made from what was given this time."""

    pipeline_class = _Changed


class _SkipsEmpty(Pipeline):
    async def plan(self, job: Job, offers: Sequence[Offer]) -> Plan:
        plan = await super().plan(job, offers)
        if not merge_offers(offers):
            return replace(plan, existing="", retry=True)
        return plan


class SkipsEmptyDelta(Publisher):
    """Nothing changed, nothing published."""

    pipeline_class = _SkipsEmpty


class WakeFailsPublish(Publisher):
    """The wake is part of the publication."""

    def publish(self, tensors: Mapping[str, Any], **options: Any) -> Publication:
        publication = super().publish(tensors, **options)
        publication.wait()
        assert self._pool is not None
        asyncio.run(self._pool.wake())
        return publication


class _Rewrites(Pipeline):
    async def plan(self, job: Job, offers: Sequence[Offer]) -> Plan:
        store, ref = self.session.store, job.publication.ref
        if ref.version <= self.session.sealed.ref.version:
            for key in await store.list(version_prefix(self.session.record, ref.version)):
                if not key.endswith((INDEX_NAME, ".json")):
                    await store.delete(key)
                    await store.create(key, b"rewritten")
        return await super().plan(job, offers)


class RewritesSealed(Publisher):
    """A retry writes the files again."""

    pipeline_class = _Rewrites


class VersionReused(Publisher):
    """A restart counts from the boot version."""

    def _number(self, session: Session, version: int | None) -> int:
        if version is None and self._head is None:
            return session.record.boot_version + 1
        return super()._number(session, version)


class _Trusting(Pipeline):
    async def move_pointer(self, ref: Ref) -> None:
        await self.session.store.swap_pointer(self.session.token, str(ref))
        found = await self.session.store.read_pointer()
        self.session.token, self.session.pointer = found.token, ref


class UnknownIsWon(Publisher):
    """The result of the swap is not looked at."""

    pipeline_class = _Trusting


class _Forceful(Pipeline):
    async def move_pointer(self, ref: Ref) -> None:
        self.session.token = (await self.session.store.read_pointer()).token
        await self.session.move_pointer(ref)


class ReadsBeforeSwap(Publisher):
    """The swap compares with a pointer read just before: another writer is overwritten."""

    pipeline_class = _Forceful


class ComparesNumbers(Publisher):
    """Tensors are compared as floats."""

    def _job(self, session: Session, view: Callable[[], Sequence[RawTensor]], *rest: Any) -> Job:
        def changed(raw: RawTensor) -> bool:
            old = session.sealed.tensors.get(raw.name)
            if old is None or raw.dtype != "F32":
                return True
            one, two = np.frombuffer(old.data, "<f4"), np.frombuffer(raw.data, "<f4")
            return not np.array_equal(one, two, equal_nan=True)

        return super()._job(session, lambda: [raw for raw in view() if changed(raw)], *rest)


class RollbackRewinds(Publisher):
    """A rollback points back to the old version."""

    def rollback(self, to_version: int) -> Publication:
        session = self._claimed()
        ref = Ref(self.run_id, to_version)
        asyncio.run(self._store.swap_pointer(session.token, str(ref)))
        publication = Publication(ref, Kind.DELTA)
        publication.resolve(Published(ref, Kind.DELTA, 0, 0, 0, 0.0, 0.0, "", "", False))
        return publication


class _Tolerant(Pipeline):
    async def run(self, job: Job) -> Published:
        try:
            return await super().run(job)
        except StitchError:
            ref = job.publication.ref
            return Published(ref, Kind.DELTA, 0, 0, 0, 0.0, 0.0, "", "", True)


class SwallowsFailure(Publisher):
    """A failed upload is logged and forgotten."""

    pipeline_class = _Tolerant


# Each broken publisher and the case that must fail on it.
BROKEN_PUBLISHERS: Final[tuple[tuple[type[Publisher], PublisherCase], ...]] = (
    (PointerBeforeSeal, suite.pointer_names_only_complete_versions),
    (BaselineFollowsUnsealed, suite.baseline_follows_sealed_versions),
    (KeepsCallersBuffers, suite.inputs_are_not_read_after_publish),
    (SwallowsConflict, suite.conflict_is_raised_and_nobody_woken),
    (AnchorOfChangedOnly, suite.anchor_holds_every_tensor),
    (SkipsEmptyDelta, suite.empty_delta_is_a_version),
    (WakeFailsPublish, suite.failed_wake_is_no_failure),
    (RewritesSealed, suite.equal_retry_succeeds_without_rewriting),
    (VersionReused, suite.restart_goes_on_above_the_pointer),
    (UnknownIsWon, suite.unknown_swap_is_read_back),
    (ReadsBeforeSwap, suite.pointer_moved_during_the_seal_is_a_conflict),
    (ComparesNumbers, suite.every_changed_byte_ships),
    (RollbackRewinds, suite.rollback_is_a_new_version),
    (SwallowsFailure, suite.failed_publication_moves_nothing),
)
