"""The Publisher: the sync face that a trainer calls.

`publish` compares and copies in the caller's thread; the store is written in the background by
one task on a private loop. `docs/stores.md`, section "Publishing", is the guide. Past 400 lines,
since it is the one public class and a third of it says what its options and calls mean.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from stitch.checksum import DIGEST_FORMATS
from stitch.delta import check_encoding
from stitch.env import Env
from stitch.errors import Conflict, InvalidInput, Unavailable
from stitch.format.tensors import RawTensor, as_raw_tensors
from stitch.pools.base import Pool
from stitch.publisher.claim import ClaimRequest
from stitch.publisher.claimer import Claimer
from stitch.publisher.encode import Change, copy_all, encode_changes
from stitch.publisher.job import Job, PipelineOptions
from stitch.publisher.live import FetchReport, LiveWatch, fetch_server_info
from stitch.publisher.loop import LoopThread
from stitch.publisher.measures import Measures
from stitch.publisher.pipeline import Pipeline
from stitch.publisher.publication import LiveReport, Publication
from stitch.publisher.ranks import Ranks, open_ranks
from stitch.publisher.session import Session
from stitch.publisher.state import Layer, SealedState
from stitch.publisher.worker import Worker
from stitch.stores import open_store
from stitch.stores.base import Store
from stitch.types import VERSION_MAX, Kind, Ref

__all__ = ["Publisher"]

log = logging.getLogger(__name__)

_IN_FLIGHT_MAX: Final = 2
_RANK_S_MAX: Final = 1800.0


class Publisher:
    """Publishes the versions of one run. Any thread may call it; calls are serialised.

    Args:
        store: a Store, or a URL (then the publisher closes what it opened).
        run_id: the run to claim, or to go on with after a restart.
        base: HF checkpoint directory of the boot version. Without it the first version must
            be, and is, an anchor with every tensor.
        boot_version: the number that the base counts as; 0 unless given.
        fork_from: start the run from another's version: a Ref, its text, or "pointer".
        encoding, checksum: of deltas; see `docs/publication-format.md`.
        anchor_every: at most so many versions from anchor to anchor; None means no limit.
        anchor_ratio: a delta bigger than this share of the model becomes an anchor.
        threads: for comparing and compressing; 0 means one per core.
        in_flight_max: publications under way before `publish` blocks.
        pool: replicas to wake, and to ask in `wait_live`.
        group: a torch.distributed group whose ranks all call every method together. Making
            the publisher is then collective too.
        rank_timeout_s: how long ranks wait for each other in the background.
        cache_dir: where versions of a store that is not local go while a state is rebuilt.

    Memory: one copy of the model, plus a copy of what changed per publication under way.
    """

    pipeline_class: type[Pipeline] = Pipeline
    _measures: Measures | None = None

    def __init__(
        self,
        store: Store | str,
        *,
        run_id: str,
        base: str | os.PathLike[str] | None = None,
        boot_version: int | None = None,
        fork_from: Ref | str | None = None,
        encoding: str = "xor",
        checksum: str = "xxh3-128",
        anchor_every: int | None = 64,
        anchor_ratio: float = 0.9,
        file_bytes_max: int = 4 * 2**30,
        threads: int = 0,
        in_flight_max: int = _IN_FLIGHT_MAX,
        pool: Pool | None = None,
        group: Any = None,
        rank_timeout_s: float = _RANK_S_MAX,
        cache_dir: str | os.PathLike[str] | None = None,
        env: Env | None = None,
        fetch_report: FetchReport = fetch_server_info,
    ) -> None:
        Ref(run_id, boot_version or 0)
        self._options = PipelineOptions(
            encoding, checksum, anchor_every, anchor_ratio, file_bytes_max
        )
        _check_options(self._options, in_flight_max=in_flight_max, threads=threads)
        self._env = env if env is not None else Env()
        self._owns_store = isinstance(store, str)
        self._store = open_store(store, env=self._env) if isinstance(store, str) else store
        self._base = Path(base) if base is not None else None
        self._cache_dir = Path(cache_dir) if cache_dir is not None else None
        self._threads = threads or os.cpu_count() or 1
        self._pool = pool
        self._fetch_report = fetch_report
        self._ranks: Ranks = open_ranks(group, self._env, timeout_s=rank_timeout_s)
        self._claimer = Claimer(
            self._store,
            ClaimRequest(run_id, boot_version, fork_from),
            self._ranks,
            self._env,
            base=self._base,
            cache_dir=self._cache_dir,
            threads=self._threads,
        )
        # The last publication, in a box: the exit hook must not keep this object alive.
        self._newest: list[Publication] = []
        self._on_exit = functools.partial(_warn_of_loss, self._newest)
        self._run_id = run_id
        self._in_flight_max = in_flight_max
        self._slots = threading.BoundedSemaphore(in_flight_max)
        self._order = threading.RLock()
        self._executor = ThreadPoolExecutor(self._threads) if self._threads > 1 else None
        self._loop = LoopThread(f"stitch-publisher-{run_id}")
        self._session: Session | None = None
        self._worker: Worker | None = None
        # The newest publication, which the next one is encoded on, and the number it has.
        self._head: Layer | None = None
        self._issued = -1
        self._closed = False

    # Claiming

    def claim(self) -> Ref:
        """Claim the run, or resume it at the pointer. `publish` does it if need be. Idempotent.

        Returns: where the pointer stands. Raises: Conflict when the run is another's or was
            superseded; InvalidInput for a base that does not fit; Unavailable.
        """
        with self._order:
            return self._claimed().pointer

    @property
    def run_id(self) -> str:
        """The run this publisher writes."""
        return self._run_id

    @property
    def ref(self) -> Ref | None:
        """The last sealed version; None before the run is claimed."""
        return self._session.sealed.ref if self._session is not None else None

    def _claimed(self) -> Session:
        if self._closed:
            raise Unavailable("the publisher is closed")
        if self._session is None:
            session = self._loop.run(self._claimer.claim())
            self._session = session
            self._issued = session.sealed.ref.version
            pipeline = self.pipeline_class(session, self._ranks, self._env, self._options)
            self._measures = pipeline.measures
            self._worker = self._loop.run(self._start(pipeline))
            atexit.register(self._on_exit)
        return self._session

    async def _start(self, pipeline: Pipeline) -> Worker:
        pool = self._pool if self._ranks.rank == 0 else None
        return Worker(pipeline, pool, self._env, self._slots.release)

    # Publishing

    def publish(
        self,
        tensors: Mapping[str, Any],
        *,
        version: int | None = None,
        anchor: bool = False,
        rebase: bool = False,
    ) -> Publication:
        """Publish one version. Returns when no byte of the inputs will be read again.

        Args:
            tensors: name -> torch.Tensor, numpy.ndarray or RawTensor; of this rank, under the
                checkpoint's names. A name that is left out stays as it is.
            version: its number; the next one by default. One that is published already is a
                success if the bytes are equal, and a Conflict if not.
            anchor: store every tensor whole.
            rebase: the tensors given are the whole model from now on: names, dtypes and shapes may
                change. Implies `anchor`.
        Blocks while as many publications as `in_flight_max` are under way.
        Raises: InvalidInput for tensors that do not fit the model; Conflict for a version below
            the run's, and once another writer owns the run; Unavailable when the run cannot be
            claimed. What fails later is raised by `Publication.wait`.
        """
        return self._publish(lambda: as_raw_tensors(tensors), version, anchor, rebase, None)

    def rollback(self, to_version: int) -> Publication:
        """Publish a new, higher version whose bytes equal those of `to_version`.

        Raises: InvalidInput for a version the run never had; NotVisibleYet or CorruptData if its
            state cannot be rebuilt.
        """
        with self._order:
            session = self._claimed()
            record = session.record
            if not record.boot_version <= to_version <= self._issued:
                raise InvalidInput(
                    f"run {record.run_id} has versions {record.boot_version} to {self._issued}, "
                    f"not {to_version}",
                    param="to_version",
                )
            old: SealedState = self._loop.run(self._claimer.load(record, to_version))
            # Each rank gives what it holds; alone, or with nothing held, rank 0 gives all.
            names = set(session.sealed.tensors)
            if self._ranks.size == 1 or not session.sealed.known:
                names = set(old.tensors) if self._ranks.rank == 0 else set()
            given = [
                RawTensor(state.name, state.dtype, state.shape, state.data)
                for name, state in old.tensors.items()
                if name in names
            ]
            rebase = self._ranks.size == 1 and not _same_model(session.sealed, old)
            return self._publish(lambda: given, None, False, rebase, Ref(record.run_id, to_version))

    def _publish(
        self,
        view: Callable[[], Sequence[RawTensor]],
        version: int | None,
        anchor: bool,
        rebase: bool,
        rollback_of: Ref | None,
    ) -> Publication:
        with self._order:
            session = self._claimed()
            if session.fence is not None and self._ranks.size == 1:
                raise Conflict(session.fence.message, **session.fence.fields)
            number = self._number(session, version)
            self._slots.acquire()
            try:
                job = self._job(session, view, number, anchor or rebase, rebase, rollback_of)
            except BaseException:
                self._slots.release()
                raise
            assert self._worker is not None
            self._loop.run(self._worker.enqueue(job))
            # Only now: the next one may be encoded on this one's layer, and if a signal's handler
            # raised before, nobody will ever run it.
            self._newest[:] = [job.publication]
            if number > self._issued:
                self._head, self._issued = job.layer, number
            if job.error is not None:
                raise job.error
            return job.publication

    def _number(self, session: Session, version: int | None) -> int:
        if version is None:
            alone = self._ranks.size == 1
            head = self._head
            if alone and head is not None and head.failed and not head.doubtful:
                # Nothing became visible under that number, and nothing is encoded on it.
                self._head, self._issued = None, session.sealed.ref.version
            return self._issued + 1
        if isinstance(version, bool) or not isinstance(version, int):
            raise InvalidInput(f"version {version!r} must be an integer", param="version")
        boot = session.record.boot_version
        if not boot < version <= VERSION_MAX:
            raise InvalidInput(
                f"version {version} must be above the boot version {boot}, whose bytes are fixed",
                param="version",
            )
        return version

    def _job(
        self,
        session: Session,
        view: Callable[[], Sequence[RawTensor]],
        number: int,
        anchor: bool,
        rebase: bool,
        rollback_of: Ref | None,
    ) -> Job:
        started = self._env.clock.monotonic()
        below = self._below()
        layers, opaque = (below.visible(), below.opaque) if below is not None else ([], False)
        sealed = session.sealed  # after the layers: see Layer.visible
        if not opaque:
            layers.append(dict(sealed.tensors))
        alone = rebase or (below is None and not sealed.known)
        layer = Layer({}, below, alone)
        changes: list[Change] = []
        given: frozenset[str] = frozenset()
        error: Exception | None = None
        try:
            raw = view()
            given = frozenset(tensor.name for tensor in raw)
            if alone:
                changes = copy_all(raw, executor=self._executor)
            else:
                changes = encode_changes(
                    raw,
                    lambda name: next((shown[name] for shown in layers if name in shown), None),
                    encoding=self._options.encoding,
                    checksum_format=self._options.checksum_format,
                    executor=self._executor,
                )
        except Exception as failure:
            if self._ranks.size == 1:
                raise
            error = failure  # the other ranks wait for this one's offer
        layer.after = {change.state.name: change.state for change in changes}
        encoded = {c.encoded.name: c.encoded for c in changes if c.encoded is not None}
        ref = Ref(self.run_id, number)
        kind = Kind.ANCHOR if anchor or alone else Kind.DELTA
        spent = self._env.clock.monotonic() - started
        return Job(Publication(ref, kind), layer, given, encoded, anchor, spent, rollback_of, error)

    def _below(self) -> Layer | None:
        """What the next publication is encoded on: None means the sealed state."""
        head = self._head
        return None if head is None or head.sealed or head.failed else head

    # Replicas

    def wait_live(
        self, version: int, *, replicas: int | float = 1.0, timeout: float = 60.0
    ) -> LiveReport:
        """Wait until enough replicas of the pool serve `version` or a later one.

        Args: replicas: a count, or a share (float) of those READY or CATCHING_UP at the call.
        Returns: who is live and who is missing and why; `enough` tells whether it is enough.
        """
        if self._pool is None:
            raise InvalidInput("wait_live needs a pool: Publisher(store, pool=…)", param="pool")
        watch = LiveWatch(self._pool, self._env, self._fetch_report)
        ref = Ref(self.run_id, version)
        return self._loop.run(watch.wait(ref, replicas=replicas, timeout_s=timeout))

    def metrics_text(self) -> str:
        """This publisher's metrics in Prometheus' text form, for the trainer's own page; empty
        before the run is claimed. Raises: Unavailable once closed."""
        with self._order:
            if self._closed:
                raise Unavailable("the publisher is closed")
            measures = self._measures
            return self._loop.run(measures.text()) if measures is not None else ""

    # Forking and closing

    def fork(self, run_id: str, *, from_ref: Ref | str = "pointer", **changes: Any) -> Publisher:
        """A publisher of a new run that starts from `from_ref`, with this one's settings.

        The new run's boot version is the version it starts from. Not for a group: make a new
        `Publisher(…, fork_from=…)` on all ranks there.
        """
        if self._ranks.size > 1:
            raise InvalidInput("make Publisher(…, fork_from=…) on all ranks instead", param="group")
        settings: dict[str, Any] = {
            "base": self._base,
            "encoding": self._options.encoding,
            "checksum": self._options.checksum_format,
            "anchor_every": self._options.anchor_every,
            "anchor_ratio": self._options.anchor_ratio,
            "file_bytes_max": self._options.file_bytes_max,
            "threads": self._threads,
            "in_flight_max": self._in_flight_max,
            "pool": self._pool,
            "cache_dir": self._cache_dir,
            "env": self._env,
            "fetch_report": self._fetch_report,
        }
        store = self._store.url if self._owns_store else self._store
        forked = type(self)(store, run_id=run_id, fork_from=from_ref, **{**settings, **changes})
        try:
            forked.claim()
        except BaseException:
            forked.close()
            raise
        return forked

    def close(self) -> None:
        """Finish what is under way, then let go of loop and threads. Idempotent."""
        with self._order:
            if self._closed:
                return
            self._closed = True
            atexit.unregister(self._on_exit)
            try:
                if self._worker is not None:
                    self._loop.run(self._worker.drain())
                if self._owns_store:
                    self._loop.run(self._store.close())
            finally:
                self._loop.close()
                if self._executor is not None:
                    self._executor.shutdown()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _warn_of_loss(newest: Sequence[Publication]) -> None:
    """At the end of a process that did not close its publisher: by now nothing can be written."""
    for publication in newest:
        if not publication.done() or publication.error is not None:
            log.warning(
                "the process ended before %s was published: close the publisher, or wait()",
                publication.ref,
            )


def _same_model(one: SealedState, other: SealedState) -> bool:
    if not one.known or one.tensors.keys() != other.tensors.keys():
        return False
    return all(
        state.same_kind(other.tensors[name].dtype, other.tensors[name].shape)
        for name, state in one.tensors.items()
    )


def _check_options(options: PipelineOptions, *, in_flight_max: int, threads: int) -> None:
    """Raises: InvalidInput, Unsupported naming the option."""
    check_encoding(options.encoding)
    if options.checksum_format not in DIGEST_FORMATS:
        raise InvalidInput(
            f"checksum {options.checksum_format!r} is not one of {', '.join(DIGEST_FORMATS)}",
            param="checksum",
        )
    if not options.anchor_ratio > 0:
        raise InvalidInput(
            f"anchor_ratio {options.anchor_ratio} must be above 0", param="anchor_ratio"
        )
    for name, value, least in (
        ("anchor_every", options.anchor_every, 1),
        ("file_bytes_max", options.file_bytes_max, 1),
        ("in_flight_max", in_flight_max, 1),
        ("threads", threads, 0),
    ):
        if value is not None and value < least:
            raise InvalidInput(f"{name} {value} must be at least {least}", param=name)
