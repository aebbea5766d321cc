"""The loop: look at the pointer, decide, perform; wakes coalesced, polling as the backstop.

One task owns the life, the status and the gate's reconciler side. `watch` runs beside it; it
only marks the life as unknown, and never while an activation runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging

from stitch.destinations.base import StageRequest
from stitch.engines.base import Engine
from stitch.env import Env
from stitch.errors import (
    ActivationFailed,
    CorruptData,
    EngineUnavailable,
    NotReady,
    NotVisibleYet,
    ReplicaLost,
    StitchError,
    Unavailable,
)
from stitch.reconciler.activate import Activated, Activator
from stitch.reconciler.config import DestinationFactory
from stitch.reconciler.decide import (
    Activate,
    BaseMatch,
    Idle,
    Observed,
    Refuse,
    Relabel,
    Step,
    match_base,
    next_step,
)
from stitch.reconciler.life import UNNAMED, Life, lose
from stitch.reconciler.plan import Fetched, Held, StoreLease, fetch_path, run_record
from stitch.reconciler.recover import Recovery
from stitch.reconciler.status import PassRecord, ReplicaStatus
from stitch.reconciler.watch import EngineWatch
from stitch.stores.base import Store
from stitch.stores.versions import BARE_RUN_ID, load_run, read_manifest, resolve_pointer
from stitch.types import GateState, Phase, Ref

__all__ = ["Driver"]

log = logging.getLogger(__name__)


class Driver:
    """Runs one replica's reconciliation."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        factory: DestinationFactory,
        status: ReplicaStatus,
        env: Env,
    ) -> None:
        config = status.config
        self._store = store
        self._engine = engine
        self._status = status
        self._gate = status.gate
        self._config = config
        self._env = env
        self._life: Life | None = None
        self._recovery = Recovery(engine, factory, status, config, env)
        self._activator = Activator(engine, status, config, env)
        self._lease = StoreLease(store, config.replica_id, env, beat_s=config.lease_beat_s)
        self._cache = config.work_dir / "fetched"
        self._wake = asyncio.Event()
        self._watch = EngineWatch(status, env, life=lambda: self._life, wake=self.wake)
        self._stopped = False
        self._seen: Ref | None = None
        self._superseded_runs: frozenset[str] = frozenset()
        self._scrubbed = env.clock.monotonic()

    def wake(self) -> None:
        """A hint: look at the pointer soon. Any number during one pass cause one more."""
        self._wake.set()

    def stop(self) -> None:
        """Start no further pass: the replica is leaving."""
        self._stopped = True
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled. Raises: ReplicaLost."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._loop(), name="reconcile")
                tasks.create_task(self._watch.health(), name="engine-watch")
                if not self._engine.capabilities.keyed_cache:
                    tasks.create_task(self._watch.crossings(), name="flush-after-crossing")
        except BaseExceptionGroup as group:
            lost = [error for error in group.exceptions if isinstance(error, ReplicaLost)]
            if lost:
                raise lost[0] from group
            raise

    async def close(self) -> None:
        """Remove what the destination and the fetch cache wrote."""
        life, self._life = self._life, None
        with contextlib.suppress(StitchError, OSError):
            if life is not None:
                await life.destination.close()
            await self._env.offload(lambda: self._env.files.remove_tree(self._cache))

    async def _loop(self) -> None:
        failures, patient = 0, False
        while not self._stopped:
            self._wake.clear()
            began = self._env.clock.monotonic()
            more = False
            try:
                more = await self._pass()
                failures = 0
            except ReplicaLost:
                raise
            except StitchError as error:
                failures += 1
                # Trying again can only help after a while, and it may close the gate.
                patient = isinstance(error, ActivationFailed | CorruptData)
                self._failed(error)
            except OSError as error:
                failures += 1
                self._failed(Unavailable(f"{error.filename}: {error.strerror or error}"))
            await self._rest(began, failures, more, patient and failures > 0)

    async def _rest(self, began: float, failures: int, more: bool, patient: bool) -> None:
        """Wait for a wake, the poll, or the backoff after a failure (all of it if `patient`)."""
        clock, config = self._env.clock, self._config
        spent = clock.monotonic() - began
        if spent < config.pass_interval_s:
            await clock.sleep(config.pass_interval_s - spent)
        if more or (self._life is not None and not self._life.known):
            return
        delay: float | None = None
        if failures:
            delay = min(config.backoff_s_max, config.backoff_s_min * 2.0 ** min(failures - 1, 16))
            if config.poll_s:
                delay = min(delay, max(config.poll_s, config.backoff_s_min))
        elif config.poll_s:
            delay = config.poll_s
        if delay is not None:
            delay *= 1 + config.poll_jitter * self._env.random.uniform(-1, 1)
        if patient and delay is not None:
            await clock.sleep(delay)
            return
        try:
            async with clock.timeout(delay):
                await self._wake.wait()
        except TimeoutError:
            return

    def _failed(self, error: StitchError) -> None:
        log.warning("pass failed", extra={"code": error.code, "error": error.message})
        self._status.passes_failed += 1
        self._status.metrics.add("stitch_replica_passes_total", outcome=error.code)
        record = self._status.last_pass or PassRecord(self._env.clock.wall())
        self._status.last_pass = dataclasses.replace(record, error=error.message)
        self._status.phase = Phase.IDLE
        self._status.fail(error)

    async def _pass(self) -> bool:
        """One pass. True if another should follow at once."""
        status = self._status
        status.passes += 1
        if self._life is None or not self._life.known:
            self._life = await self._recovery.restore(self._life)
            self._scrubbed = self._env.clock.monotonic()
        life = self._life
        seen = await self._observe(life)
        step = next_step(seen)
        more = await self._perform(life, step, seen)
        if isinstance(step, Idle):
            if seen.served is not None:
                status.latched = True
            await self._scrub_when_due(life)
        if not more and status.last_pass is not None:
            status.last_pass.error = None
        status.metrics.add("stitch_replica_passes_total", outcome="ok")
        status.succeed()
        return more

    async def _perform(self, life: Life, step: Step, seen: Observed) -> bool:
        if isinstance(step, Idle):
            return False
        if isinstance(step, Refuse):
            raise step.error
        if isinstance(step, Relabel):
            return await self._relabel(life, step.target, seen)
        assert seen.latest is not None
        try:
            await self._prepare_and_activate(life, step, seen)
        finally:
            if life.staged is not None and life.known and self._gate.state is GateState.OPEN:
                staged, life.staged = life.staged, None
                await life.destination.discard(staged)
        return True

    async def _observe(self, life: Life) -> Observed:
        """Read the pointer and everything the decision rests on."""
        latest = await resolve_pointer(
            self._store, self._seen, env=self._env, deadline_s=self._config.visible_deadline_s
        )
        self._check_named(latest)
        self._see(latest)
        if latest is not None and life.held is not None and not life.base_judged:
            await self._judge_base(life, latest)
        served = life.held
        seen = Observed(
            known=life.known,
            latest=latest,
            served=served,
            superseded_max=self._config.supersede_max,
        )
        if served is None:
            return await self._with_boot(life, seen)
        if latest is not None and latest.run_id != served.run_id:
            record = await run_record(self._store, latest.run_id)
            if match_base(life.destination.digest, record.base_digest) == "equal":
                fork = Ref(latest.run_id, record.boot_version)
                return dataclasses.replace(seen, fork=fork)
        return seen

    def _check_named(self, latest: Ref | None) -> None:
        """A pointer that named a run never goes back to a bare number: that is a torn read."""
        if latest is None or latest.run_id != BARE_RUN_ID:
            return
        if self._seen is not None and self._seen.run_id != BARE_RUN_ID:
            raise NotVisibleYet(f"the pointer names no run; it named {self._seen} before")

    async def _judge_base(self, life: Life, latest: Ref) -> None:
        """The boot checkpoint was named before its run had a record; now there may be one.

        If the record disproves it, the name was wrong: nothing is served under it any longer.
        """
        boot = life.held
        if boot is None or boot.run_id != latest.run_id:
            return
        match = await self._match_boot(life, boot)
        life.base_judged = match != "unproven"
        if match == "differs":
            life.held = None
            self._gate.open(None)
            self._gate.abort_all(
                NotReady(
                    f"the checkpoint served as {boot} is not the base of that run",
                    run_id=boot.run_id,
                    target_version=None,
                    applied=None,
                    reason="behind",
                )
            )
            await life.control.label(life.label_attempt(), None)

    async def _with_boot(self, life: Life, seen: Observed) -> Observed:
        """What the boot checkpoint counts as, and whether the store proves or disproves it."""
        boot = self._config.boot
        if boot is None:
            if seen.latest is None:
                return seen
            record = await run_record(self._store, seen.latest.run_id)
            boot = Ref(record.run_id, record.boot_version)
        match = await self._match_boot(life, boot)
        life.base_judged = match != "unproven"
        return dataclasses.replace(seen, boot=boot, boot_match=match)

    async def _match_boot(self, life: Life, boot: Ref) -> BaseMatch:
        """Compare the bytes held with what the store says that `boot` is."""
        found = await load_run(self._store, boot.run_id)
        declared = None
        if found is not None and boot.version == found.boot_version:
            declared = found.base_digest
        elif found is not None and boot.version > found.boot_version:
            with contextlib.suppress(NotVisibleYet):
                manifest, _ = await read_manifest(self._store, found, boot.version)
                declared = None if manifest is None else manifest.target_digest
        match = match_base(life.destination.digest, declared)
        self._status.base = "proven" if match == "equal" else match
        return match

    def _see(self, latest: Ref | None) -> None:
        if latest is not None:
            if self._seen is not None and self._seen.run_id != latest.run_id:
                self._superseded_runs |= {self._seen.run_id}
            self._superseded_runs -= {latest.run_id}
            self._seen = latest
        self._status.latest = latest
        self._gate.see_latest(latest, self._superseded_runs)
        self._gate.why_unserved = self._status.unclaimed
        self._status.changed()

    async def _relabel(self, life: Life, target: Ref, seen: Observed) -> bool:
        moved = await self._activator.move_label(life, target)
        if moved and seen.served is not None:
            self._status.last_pass = PassRecord(
                self._env.clock.wall(),
                target_version=target.version,
                applied_version=target.version,
                skipped_weight_update=True,
            )
        return True

    async def _prepare_and_activate(self, life: Life, step: Step, seen: Observed) -> None:
        """Stage the pointer's version, look again a bounded number of times, activate once."""
        assert seen.latest is not None
        record = PassRecord(self._env.clock.wall(), target_version=seen.latest.version)
        self._status.last_pass = record
        life.superseded = 0
        async with self._lease.held(life.incarnation, [life.held, seen.latest]):
            before: Fetched | None = None
            while not isinstance(step, Activate):
                assert seen.latest is not None
                try:
                    fetched = await self._fetch(life, seen.latest)
                    if fetched.empty and before is None and life.held is not None:
                        await self._skip(life, fetched, record)
                        return
                    await self._stage(life, fetched, record)
                    before = fetched
                except StitchError as error:
                    if before is None:
                        raise
                    # The newer version is not to be had; the one prepared before it is.
                    record.coalesce_error = error.message
                    if life.staged is None:
                        await self._stage(life, before, record)
                seen, step = await self._second_look(life, seen, record)
        assert life.staged is not None
        staged = life.staged
        record.target_version = staged.target.version
        done = await self._activator.activate(life, staged, drain_all=step.drain_all)
        if done is not None:
            life.staged = None
            self._recorded(record, staged.target, done)
            await self._env.offload(lambda: self._env.files.remove_tree(self._cache))

    async def _fetch(self, life: Life, target: Ref) -> Fetched:
        self._enter(Phase.FETCHING)
        destination = life.destination
        held = Held(life.held, destination.digest, destination.boot_digest)
        # A boot checkpoint that a run's own record disproves is never a start.
        trust = self._status.base != "differs"
        try:
            return await fetch_path(
                self._store, target, held, self._cache, self._env, trust_base=trust
            )
        finally:
            self._enter(Phase.IDLE)

    async def _stage(self, life: Life, fetched: Fetched, record: PassRecord) -> None:
        if life.staged is not None:
            staged, life.staged = life.staged, None
            life.superseded += 1
            await life.destination.discard(staged)
            record.initial_target_version = record.initial_target_version or staged.target.version
            record.coalesced_versions = fetched.target.version - staged.target.version
        self._enter(Phase.STAGING)
        request = StageRequest(
            base=life.held or UNNAMED,
            target=fetched.target,
            chain=fetched.chain,
            attempt=life.next_attempt(),
            from_boot=fetched.from_boot,
        )
        try:
            async with self._env.clock.timeout(self._config.stage_s_max):
                life.staged = await life.destination.stage(request)
        except TimeoutError as error:
            raise Unavailable(
                f"staging {fetched.target} took longer than {self._config.stage_s_max:g} s"
            ) from error
        finally:
            self._enter(Phase.IDLE)
        record.stage_s = life.staged.stage_s
        record.bytes_read = life.staged.bytes_read
        self._status.metrics.observe("stitch_replica_stage_seconds", life.staged.stage_s)
        self._status.metrics.add("stitch_replica_stage_bytes_total", life.staged.bytes_read)

    async def _second_look(
        self, life: Life, seen: Observed, record: PassRecord
    ) -> tuple[Observed, Step]:
        """Has the pointer moved on within the run? A failed look activates what is staged."""
        assert life.staged is not None
        target = life.staged.target
        latest = target
        if record.coalesce_error is None:
            try:
                found = await resolve_pointer(self._store, self._seen, env=self._env, deadline_s=0)
                if found is not None and found.run_id == target.run_id:
                    latest = found
                    self._see(found)
            except StitchError as error:
                record.coalesce_error = error.message
        look = dataclasses.replace(
            seen, latest=latest, staged=target, superseded=life.superseded, fork=None
        )
        return look, next_step(look)

    async def _skip(self, life: Life, fetched: Fetched, record: PassRecord) -> None:
        """Every version on the way changes nothing: only the name moves."""
        if await self._activator.move_label(life, fetched.target):
            record.applied_version = fetched.target.version
            record.skipped_weight_update = True

    async def _scrub_when_due(self, life: Life) -> None:
        now = self._env.clock.monotonic()
        if not self._config.scrub_s or now - self._scrubbed < self._config.scrub_s:
            return
        self._scrubbed = now
        verified = await life.destination.scrub()
        if not verified.ok:
            lose(life, self._status)
            raise EngineUnavailable(
                f"{len(verified.mismatched)} live tensors changed by themselves, first "
                f"{verified.mismatched[0]!r}"
            )

    def _recorded(self, record: PassRecord, target: Ref, done: Activated) -> None:
        record.applied_version = target.version
        record.commit_s = done.gate_closed_s
        record.gate_closed_s = done.gate_closed_s
        record.swap_s = done.swap_s
        record.recompute_s = done.recompute_s
        record.drain_s = done.drain_s
        if self._life is not None:
            # The boot checkpoint's name matters no more: what is served was verified on its own.
            self._life.superseded, self._life.base_judged = 0, True
        if self._status.base == "differs":
            self._status.base = "proven"
        log.info(
            "activated",
            extra={
                "run_id": target.run_id,
                "version": target.version,
                "gate_closed_s": done.gate_closed_s,
                "swap_s": done.swap_s,
                "crossing": done.crossing,
            },
        )

    def _enter(self, phase: Phase) -> None:
        self._status.phase = phase
        self._status.changed()
