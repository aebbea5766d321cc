"""The training loop: take rollouts, step, publish; in the middle, a replica dies and one joins."""

from __future__ import annotations

import threading
from collections.abc import Callable

from stitch.demo.learner import Learner, StepReport
from stitch.demo.record import RunRecord, StepRecord
from stitch.demo.rollouts import RolloutFeed
from stitch.demo.settings import DemoSettings
from stitch.errors import StitchError
from stitch.local import LocalPool
from stitch.publisher import Publication, Publisher
from stitch.rl.trajectory import Trajectory
from stitch.types import Ref

__all__ = ["Chaos", "train"]


class Chaos:
    """Kills one replica and lets a new one join, beside the training. One use."""

    def __init__(self, pool: LocalPool, record: RunRecord) -> None:
        self._pool = pool
        self._record = record
        self._error: StitchError | None = None
        self._thread = threading.Thread(target=self._act, name="stitch-chaos", daemon=True)
        self._started = False

    def strike(self) -> None:
        """Begin. Returns at once."""
        self._started = True
        self._thread.start()

    def join(self) -> None:
        """Wait until the new replica is ready. Raises: what kept it from that."""
        if self._started:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _act(self) -> None:
        try:
            victim = self._pool.kill(len(self._pool.replicas) // 2)
            self._record.ended(victim.id, killed=True)
            self._record.note(f"{victim.id} got SIGKILL")
            joiner = self._pool.add()
            self._record.note(f"{joiner.id} joined and caught up")
        except StitchError as error:
            self._error = error


def train(
    learner: Learner,
    feed: RolloutFeed,
    publisher: Publisher,
    chaos: Chaos,
    settings: DemoSettings,
    record: RunRecord,
    *,
    on_step: Callable[[], None],
) -> Ref:
    """All steps. Returns the last version, sealed and pointed to."""
    trainer = publisher.claim()
    pending: list[Publication] = []
    for step in range(1, settings.steps + 1):
        began = record.now_s
        batch = feed.take(settings.groups)
        taken = record.now_s
        report = learner.step(batch)
        trained = record.now_s
        publication = publisher.publish(learner.tensors())
        pending.append(publication)
        times = (taken - began, trained - taken, record.now_s - trained)
        _record_step(record, step, publication.ref, trainer, batch, report, times)
        trainer = publication.ref
        pending = _settle(pending, record)
        if step == settings.kill_step:
            chaos.strike()
        on_step()
    for publication in pending:
        publication.wait(settings.step_s_max)
    _settle(pending, record)
    return trainer


def _record_step(
    record: RunRecord,
    step: int,
    made: Ref,
    trainer: Ref,
    batch: list[Trajectory],
    report: StepReport,
    times: tuple[float, float, float],
) -> None:
    """`trainer` is the version the learner stood at when it consumed `batch`, `made` the next."""
    with record.lock:
        oldest = max(record.staleness.add(trajectory, trainer) for trajectory in batch)
        ages = [trainer.version - span.ref.version for t in batch for span in t.spans]
        record.trajectories += batch
        record.steps.append(
            StepRecord(
                step=step,
                at_s=record.now_s,
                version=made.version,
                reward=report.reward,
                entropy=report.entropy,
                clipped=report.clipped,
                staleness_mean=sum(ages) / len(ages),
                staleness_max=oldest,
                wait_s=times[0],
                train_s=times[1],
                publish_s=times[2],
            )
        )


def _settle(pending: list[Publication], record: RunRecord) -> list[Publication]:
    """Note the sizes of what is done, raise what failed, return what still runs."""
    rest = []
    for publication in pending:
        if not publication.done():
            rest.append(publication)
            continue
        published = publication.wait(0)
        with record.lock:
            record.delta_bytes[published.ref.version] = published.bytes
            record.kinds[published.ref.version] = published.kind.value
    return rest
