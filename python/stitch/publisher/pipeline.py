"""The way of one publication from a rank's changes to a moved pointer, one at a time, in order.

offer (every rank) -> plan (rank 0) -> files (every rank) -> manifest, seal, pointer (rank 0) ->
the sealed state moves on (every rank). Rank 0's failures reach every rank, so all ranks agree on
what is sealed. Only this module writes a `Session`. It stays one file, past 400 lines, because the
steps are read in this order and share that one owner.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from stitch.checksum import blake3
from stitch.env import Env
from stitch.errors import Conflict, InvalidInput, StitchError, Unavailable
from stitch.format.records import version_prefix
from stitch.format.tensors import RawTensor
from stitch.format.wire import FileEntry
from stitch.format.write import (
    DataFile,
    anchor_file,
    data_file_name,
    delta_file,
    facts_name,
)
from stitch.publisher.commit import (
    Documents,
    equal_manifest,
    make_documents,
    make_facts,
    retry_plan,
)
from stitch.publisher.job import Job, PipelineOptions, Receipt, make_offer
from stitch.publisher.measures import Measures
from stitch.publisher.plan import (
    FilePlan,
    Offer,
    Plan,
    assign_files,
    check_names,
    merge_offers,
)
from stitch.publisher.publication import Published
from stitch.publisher.ranks import Ranks
from stitch.publisher.session import Session
from stitch.publisher.state import SealedState, TensorFacts, TensorState, digest_after
from stitch.stores.base import Sealed, Staging
from stitch.types import Kind, Ref

__all__ = ["Pipeline"]

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class _Outcome:
    """Rank 0's result. `error` set: sealed, but the pointer could not be moved."""

    published: Published
    error: StitchError | None


class Pipeline:
    """Runs jobs of one session. One task calls `run`; nothing here is re-entrant."""

    def __init__(self, session: Session, ranks: Ranks, env: Env, options: PipelineOptions) -> None:
        self.session = session
        self.ranks = ranks
        self.env = env
        self.options = options
        self.measures = Measures()
        # Names this rank has ever given: their bytes are its baseline.
        self._mine: set[str] = set()

    async def run(self, job: Job) -> Published:
        """Publish one job.

        On failure the layer is marked and the sealed state is what the store holds.
        Raises: StitchError; anything else is a bug.
        """
        try:
            outcome = await self._publish(job)
        except BaseException:
            if not job.layer.sealed:
                job.layer.failed = True
            self.measures.failed()
            raise
        if outcome.error is not None:
            self.measures.failed()
            raise outcome.error
        self.measures.published(outcome.published)
        return outcome.published

    async def _publish(self, job: Job) -> _Outcome:
        after = job.layer.effective()
        started = self.env.clock.monotonic()
        offers = await self.ranks.all_gather(self._offer(job, after))
        staging: Staging | None = None
        try:
            plan, staging = await self._planned(job, offers)
            receipts: list[Receipt] = []
            if plan.existing is None:
                receipts = await self.ranks.all_gather(
                    await self._written(job, plan, after, staging)
                )
            outcome = await self._agreed(
                lambda: self._committed(job, offers, plan, receipts, staging, started)
            )
        except BaseException:
            await self._give_up(staging)
            raise
        if staging is not None and self.ranks.rank != 0:
            await staging.leave()
        if not plan.retry:
            self._absorb(job, after, offers, outcome)
        return outcome

    async def settle(self) -> None:
        """At the end: point to what is sealed, if the pointer could not be moved at the time."""
        session = self.session
        behind = session.pointer.version < session.sealed.ref.version
        if self.ranks.rank == 0 and behind and session.fence is None:
            await self.move_pointer(session.sealed.ref)

    # Offer and plan

    def _offer(self, job: Job, after: dict[str, TensorState]) -> Offer:
        version = job.publication.ref.version
        refusal = self.session.fence or job.error
        if refusal is not None:
            return Offer(version, {}, False, False, refusal)
        try:
            return make_offer(job, after, self.session.sealed)
        except Exception as error:
            return Offer(version, {}, False, False, error)

    async def _planned(self, job: Job, offers: list[Offer]) -> tuple[Plan, Staging | None]:
        """Rank 0 plans and begins the attempt; then the others join it."""
        opened: list[Staging] = []

        async def decide() -> Plan:
            plan = await self.plan(job, offers)
            if plan.existing is None:
                opened.append(await self._begin(job, plan))
            return plan

        plan = await self._agreed(decide)
        if plan.existing is None and self.ranks.rank != 0:
            try:
                opened.append(await self._begin(job, plan))
            except StitchError as error:
                job.error = error  # told to the others with the receipt
        return plan, opened[0] if opened else None

    async def _begin(self, job: Job, plan: Plan) -> Staging:
        prefix = version_prefix(self.session.record, job.publication.ref.version)
        return await self.session.store.begin(prefix, attempt=plan.attempt)

    async def plan(self, job: Job, offers: Sequence[Offer]) -> Plan:
        """Rank 0: check that ranks agree, choose the kind, look for an equal sealed version."""
        session, ref = self.session, job.publication.ref
        changed = merge_offers(offers)
        replaces = offers[0].replaces
        if replaces and session.names_wanted is not None:
            check_names(changed.keys(), session.names_wanted)
        target = digest_after(session.sealed, changed, replaces=replaces)
        if ref.version <= session.sealed.ref.version:
            return await retry_plan(session, ref, target_digest=target)
        await session.check_pointer()
        kind = self._kind(ref, offers, changed)
        if kind is Kind.ANCHOR and not replaces:
            self._check_whole(offers)
        if replaces and not changed:
            raise InvalidInput("no tensors were given, and a model has at least one")
        attempt = self.env.random.nonce()
        equal = await equal_manifest(session, ref, target_digest=target, changed=changed)
        if equal is not None:
            return Plan(Kind(equal[0].kind), equal[0].attempt, (), target, equal[1])
        assigned = assign_files(offers, kind=kind, file_bytes_max=self.options.file_bytes_max)
        count = sum(len(files) for files in assigned)
        number = iter(range(count))
        files = tuple(
            tuple(
                FilePlan(data_file_name(attempt, next(number), count, kind), tuple(names))
                for names in rank_files
            )
            for rank_files in assigned
        )
        return Plan(kind, attempt, files, target)

    def _kind(self, ref: Ref, offers: Sequence[Offer], changed: dict[str, TensorFacts]) -> Kind:
        sealed, options = self.session.sealed, self.options
        if any(offer.needs_anchor or offer.replaces for offer in offers):
            return Kind.ANCHOR
        if ref.version != sealed.ref.version + 1:
            return Kind.ANCHOR  # a delta over a gap is no delta to any public reader
        every = options.anchor_every
        if every is not None and sealed.deltas_since_anchor + 1 >= every:
            return Kind.ANCHOR
        full = sum(facts.nbytes for facts in (sealed.catalog or {}).values())
        blobs = sum(tensor.blob_bytes for offer in offers for tensor in offer.tensors.values())
        return Kind.ANCHOR if changed and blobs > options.anchor_ratio * full else Kind.DELTA

    def _check_whole(self, offers: Sequence[Offer]) -> None:
        missing = (self.session.sealed.catalog or {}).keys() - {
            name for offer in offers for name in offer.tensors
        }
        if missing:
            raise InvalidInput(
                f"no rank holds tensor {min(missing)!r} any more, so no anchor can be written; "
                "give it again on one rank",
                tensor=min(missing),
            )

    # Files

    async def _written(
        self, job: Job, plan: Plan, after: dict[str, TensorState], staging: Staging | None
    ) -> Receipt:
        if staging is None:
            error = job.error or Unavailable("this rank could not join the attempt")
            return Receipt(error=error)
        try:
            return await self.write_files(job, plan, after, staging)
        except Exception as error:
            # Rank boundary: the others wait for this receipt, whatever went wrong here.
            return Receipt(error=error)

    async def write_files(
        self, job: Job, plan: Plan, after: dict[str, TensorState], staging: Staging
    ) -> Receipt:
        """Write this rank's files, durable on return."""
        entries: list[FileEntry] = []
        weight_map: list[tuple[str, str]] = []
        for file in plan.files[self.ranks.rank]:
            data = await self.env.offload(
                lambda file=file: self._data_file(job, plan, after, file)  # type: ignore[misc]
            )
            await self._put(staging, data.name, data.chunks, data.size)
            entries.append(FileEntry(name=data.name, size=data.size, blake3=data.blake3))
            weight_map += [(name, data.name) for name in file.tensors]
        return Receipt(tuple(entries), tuple(weight_map))

    def _data_file(
        self, job: Job, plan: Plan, after: dict[str, TensorState], file: FilePlan
    ) -> DataFile:
        if plan.kind is Kind.DELTA:
            return delta_file(file.name, [job.encoded[name] for name in file.tensors])
        states = [after.get(name) or self.session.sealed.tensors[name] for name in file.tensors]
        return anchor_file(file.name, [RawTensor(s.name, s.dtype, s.shape, s.data) for s in states])

    async def _put(self, staging: Staging, name: str, chunks: Sequence[Any], size: int) -> None:
        written = await staging.put(name, chunks)
        if written != size:
            raise Unavailable(f"{name}: {written} of {size} bytes were written", file=name)

    # Commit

    async def _committed(
        self,
        job: Job,
        offers: list[Offer],
        plan: Plan,
        receipts: list[Receipt],
        staging: Staging | None,
        started: float,
    ) -> _Outcome:
        """Rank 0: seal and point. A pointer that could not move is an outcome, not a raise: the
        version is sealed, and the next delta is encoded against it."""
        ref = job.publication.ref
        for receipt in receipts:
            if receipt.error is not None:
                raise receipt.error
        changed = merge_offers(offers)
        manifest_digest, created, count, size = plan.existing or "", False, 0, 0
        if plan.existing is None:
            assert staging is not None
            manifest_digest, created, count, size = await self._sealed(
                job, offers, plan, receipts, staging, started
            )
        error = None
        try:
            if not plan.retry or self.session.pointer.version < ref.version:
                await self.move_pointer(ref)
        except StitchError as failure:
            error = failure
        published = Published(
            ref=ref,
            kind=plan.kind,
            bytes=size,
            files=count,
            changed=len(changed),
            encode_s=job.encode_s,
            seal_s=self.env.clock.monotonic() - started,
            target_digest=plan.target_digest,
            manifest_digest=manifest_digest,
            created=created,
        )
        return _Outcome(published, error)

    async def move_pointer(self, ref: Ref) -> None:
        """Make a sealed version the one that readers converge to."""
        await self.session.move_pointer(ref)

    async def _sealed(
        self,
        job: Job,
        offers: list[Offer],
        plan: Plan,
        receipts: list[Receipt],
        staging: Staging,
        started: float,
    ) -> tuple[str, bool, int, int]:
        """Write the documents and seal. Returns manifest digest, created, files, bytes."""
        entries = [entry for receipt in receipts for entry in receipt.entries]
        if plan.kind is Kind.ANCHOR:
            entries += await self._side_files(staging)
        documents = self.documents(job, offers, plan, receipts, entries)
        await self._put(
            staging, documents.manifest_name, [documents.manifest], len(documents.manifest)
        )
        await self._put_facts(job, offers, plan, staging, started)
        result = await self.seal(job, staging, documents)
        size = sum(entry.size for entry in entries) + len(documents.manifest) + len(documents.index)
        if result.created:
            return documents.manifest_digest, True, len(entries) + 2, size
        ref = job.publication.ref
        equal = await equal_manifest(
            self.session, ref, target_digest=plan.target_digest, changed=merge_offers(offers)
        )
        if equal is None:
            raise Unavailable(f"{ref} is said to be sealed, but its index cannot be read")
        ours = equal[0].attempt == plan.attempt
        return equal[1], ours, len(entries) + 2 if ours else 0, size if ours else 0

    def documents(
        self,
        job: Job,
        offers: list[Offer],
        plan: Plan,
        receipts: list[Receipt],
        entries: list[FileEntry],
    ) -> Documents:
        """Manifest and index. A delta lists what it changes, an anchor every tensor."""
        tensors = merge_offers(offers)
        if plan.kind is Kind.ANCHOR and not offers[0].replaces:
            tensors = {**(self.session.sealed.catalog or {}), **tensors}
        weight_map = {name: file for receipt in receipts for name, file in receipt.weight_map}
        if plan.kind is Kind.ANCHOR and weight_map.keys() != tensors.keys():
            raise AssertionError("an anchor must hold every tensor")
        return make_documents(
            job.publication.ref,
            plan,
            sealed=self.session.sealed,
            tensors=tensors,
            entries=entries,
            weight_map=weight_map,
            encoding=self.options.encoding,
            checksum_format=self.options.checksum_format,
            rollback_of=job.rollback_of,
        )

    async def seal(self, job: Job, staging: Staging, documents: Documents) -> Sealed:
        """Commit. A seal whose outcome is unknown is tried once more, which settles it."""
        try:
            return await staging.seal(documents.index)
        except Unavailable:
            try:
                return await staging.seal(documents.index)
            except Unavailable:
                job.layer.doubtful = True
                raise

    async def _put_facts(
        self, job: Job, offers: list[Offer], plan: Plan, staging: Staging, started: float
    ) -> None:
        """Measurements beside the version. Without them it is as good."""
        seconds = {"encode": job.encode_s, "write": self.env.clock.monotonic() - started}
        facts = make_facts(job.publication.ref, plan, offers, seconds)
        try:
            await staging.put(facts_name(plan.attempt), [facts])
        except StitchError as error:
            log.warning("encoder facts not written", extra={"reason": error.message[:500]})

    async def _side_files(self, staging: Staging) -> list[FileEntry]:
        """Config and tokenizer files: a public reader keeps only what an anchor has."""
        entries = []
        for name, data in sorted((self.session.sealed.side_files or {}).items()):
            await self._put(staging, name, [data], len(data))
            entries.append(FileEntry(name=name, size=len(data), blake3=blake3(data)))
        return entries

    # Ends

    def _absorb(
        self, job: Job, after: dict[str, TensorState], offers: list[Offer], outcome: _Outcome
    ) -> None:
        """The version is sealed: it is the new baseline, on every rank."""
        sealed, replaces, published = self.session.sealed, offers[0].replaces, outcome.published
        held = dict(after) if replaces else {**sealed.tensors, **after}
        self._mine = set(job.given) if replaces else self._mine | job.given
        if self.ranks.size > 1:
            held = self._kept(held, offers)
        changed = merge_offers(offers)
        catalog = None
        if self.ranks.rank == 0:
            catalog = changed if replaces else {**(sealed.catalog or {}), **changed}
        since = 0 if published.kind is Kind.ANCHOR else sealed.deltas_since_anchor + 1
        self.session.sealed = SealedState(
            published.ref,
            held,
            catalog,
            published.target_digest,
            published.manifest_digest,
            since,
            sealed.side_files,
        )
        self.session.names_wanted = None
        job.layer.sealed = True
        job.layer.below = None
        if outcome.error is not None and isinstance(outcome.error, Conflict):
            self.session.fence = outcome.error

    def _kept(self, held: dict[str, TensorState], offers: list[Offer]) -> dict[str, TensorState]:
        """What this rank still needs: its own tensors that no other rank changed without it, and
        on rank 0 those that no rank gives."""
        own = offers[self.ranks.rank].tensors
        theirs: set[str] = set()
        for rank, offer in enumerate(offers):
            if rank != self.ranks.rank:
                theirs |= {name for name, tensor in offer.tensors.items() if tensor.given}
        stale = {name for name in theirs if name not in own or not own[name].given}
        self._mine -= stale
        if self.ranks.rank == 0:
            return {name: state for name, state in held.items() if name not in stale}
        return {name: state for name, state in held.items() if name in self._mine}

    async def _give_up(self, staging: Staging | None) -> None:
        if staging is None:
            return
        try:
            if self.ranks.rank == 0:
                await staging.abandon()
            else:
                await staging.leave()
        except StitchError:
            return  # what is left is removed when the version is begun again

    async def _agreed(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work` on rank 0; every rank gets its result or raises its error."""
        value: T | None = None
        error: Exception | None = None
        if self.ranks.rank == 0:
            try:
                value = await work()
            except Exception as failure:
                # Rank boundary: the others wait for this result, whatever went wrong here.
                error = failure
        if self.ranks.size > 1:
            value, error = await self.ranks.broadcast((value, error))
        if error is not None:
            if isinstance(error, Conflict) and self.session.fence is None and _fences(error):
                self.session.fence = error
            raise error
        return value  # type: ignore[return-value]


def _fences(error: Conflict) -> bool:
    return bool(error.fields.get("fenced"))
