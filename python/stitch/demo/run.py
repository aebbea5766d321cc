"""One demo run from an empty directory to its verdict."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

from stitch.demo.checks import Check, all_checks
from stitch.demo.labels import LabelReport, check_labels, shifted
from stitch.demo.learner import Learner, LearnerConfig
from stitch.demo.model import make_checkpoint
from stitch.demo.monitor import Monitor
from stitch.demo.record import RunRecord
from stitch.demo.report import html_report
from stitch.demo.rollouts import RolloutFeed
from stitch.demo.settings import DemoSettings
from stitch.demo.trainer import Chaos, train
from stitch.demo.view import View
from stitch.env import Env
from stitch.errors import InvalidInput
from stitch.local import LocalPool
from stitch.publisher import Publisher
from stitch.publisher.loop import LoopThread
from stitch.types import Ref

__all__ = ["Outcome", "run_demo"]

RUN_ID: Final = "demo"
_MARKER: Final = ".stitch-demo"
_LAST_REPORTS_S: Final = 0.6


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to. `passed`: every required check."""

    record: RunRecord
    labels: LabelReport
    checks: list[Check]
    latest: Ref
    report_path: Path

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks if check.required)


def run_demo(
    settings: DemoSettings,
    view: View,
    *,
    env: Env,
    on_done: Callable[[Outcome, str | None], None],
) -> Outcome:
    """Train, disturb, check, report.

    `on_done` gets the outcome, and the gateway's URL if the pool still runs (`keep`): the pool
    ends when it returns. Raises: StitchError if the run could not be carried out.
    """
    torch.set_num_threads(1)  # engines share the cores with the trainer
    record = RunRecord(env.clock.monotonic)
    out = _prepare_out(settings.out)
    base = out / "base"
    make_checkpoint(base, seed=settings.seed)
    learner = Learner(base, LearnerConfig(lr=settings.lr))
    record.note("starting replicas")
    view.attach(record)
    view.step()
    with ExitStack() as stack:
        stack.callback(view.close)
        pool = stack.enter_context(_pool(settings, out, env))
        record.note(f"{len(pool.replicas)} replicas are ready")
        loop = LoopThread("stitch-demo")
        stack.callback(loop.close)
        latest, live = _train(settings, learner, pool, out, record, view, loop, env)
        if not settings.keep:
            pool.close()  # the label check gets the cores
        labels = _check_labels(settings, record, out, latest, view, env)
        checks = all_checks(
            settings, record, labels, latest=latest.version, live=live[0], missing=live[1]
        )
        outcome = _write(settings, record, labels, checks, latest, out)
        view.close()
        on_done(outcome, pool.url if settings.keep else None)
    return outcome


def _pool(settings: DemoSettings, out: Path, env: Env) -> LocalPool:
    return LocalPool(
        out / "base",
        store=out / "store",
        replicas=settings.replicas,
        run_id=RUN_ID,
        mode=settings.mode,
        log_dir=out / "logs",
        ready_s=settings.ready_s,
        replica_arguments=("--poll-s", "1"),
        env=env,
    )


def _train(
    settings: DemoSettings,
    learner: Learner,
    pool: LocalPool,
    out: Path,
    record: RunRecord,
    view: View,
    loop: LoopThread,
    env: Env,
) -> tuple[Ref, tuple[list[str], dict[str, str]]]:
    """The asynchronous part. Returns the last version, and who serves it and who does not."""
    monitor = Monitor(pool.pool, pool.url, record, loop=loop)
    feed = RolloutFeed(pool.url, settings, record, loop=loop, env=env)
    chaos = Chaos(pool, record)
    with Publisher(
        (out / "store").as_uri(),
        run_id=RUN_ID,
        base=out / "base",
        threads=1,
        pool=pool.pool,
        env=env,
    ) as publisher:
        monitor.start()
        feed.start()
        record.phase = "training"
        try:
            latest = train(learner, feed, publisher, chaos, settings, record, on_step=view.step)
            feed.stop()
            record.phase = "waiting for the replicas"
            chaos.join()
            live = publisher.wait_live(
                latest.version, replicas=settings.replicas, timeout=settings.ready_s
            )
            threading.Event().wait(_LAST_REPORTS_S)
            view.step()
            return latest, (list(live.live), dict(live.missing))
        finally:
            feed.stop()
            monitor.stop()


def _check_labels(
    settings: DemoSettings, record: RunRecord, out: Path, latest: Ref, view: View, env: Env
) -> LabelReport:
    view.step()

    def progress(done: int, total: int) -> None:
        record.phase = f"checking labels: {done} of {total} versions"
        view.progress()

    progress(0, latest.version + 1)
    trajectories = record.trajectories
    if settings.shift_labels:
        trajectories = shifted(
            trajectories, settings.shift_labels, boot_version=0, latest=latest.version
        )
    return check_labels(
        trajectories,
        base=out / "base",
        updates=out / "store" / "updates",
        run_id=RUN_ID,
        boot_version=0,
        latest=latest.version,
        scratch=out / "materialized",
        tolerance=settings.tolerance,
        reject_min=settings.reject_min,
        env=env,
        on_progress=progress,
    )


def _prepare_out(out: Path) -> Path:
    """An empty directory that is ours: new, empty, or left by an earlier demo."""
    try:
        if out.exists() and any(out.iterdir()):
            if not (out / _MARKER).exists():
                raise InvalidInput(
                    f"{out} is not empty and not an earlier demo's; choose another --out"
                )
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        (out / _MARKER).write_text("written by `stitch demo`; replaced by the next run\n")
    except OSError as error:
        raise InvalidInput(
            f"{out} cannot be written ({error.strerror}); choose another --out"
        ) from error
    return out.absolute()


def _write(
    settings: DemoSettings,
    record: RunRecord,
    labels: LabelReport,
    checks: list[Check],
    latest: Ref,
    out: Path,
) -> Outcome:
    outcome = Outcome(record, labels, checks, latest, out / "report.html")
    outcome.report_path.write_text(html_report(settings, record, labels, checks))
    document = {
        "passed": outcome.passed,
        "checks": [asdict(check) for check in checks],
        "labels": labels.to_wire(),
        "latest": str(latest),
        "settings": {**asdict(settings), "out": str(settings.out)},
        **record.to_wire(),
    }
    (out / "report.json").write_text(json.dumps(document))
    return outcome
