"""Reports, `/server_info`, health and metrics of one replica."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stitch.admission import AdmissionGate
from stitch.env import Env, SystemClock
from stitch.errors import InvalidInput, NotVisibleYet
from stitch.reconciler.config import ReplicaConfig
from stitch.reconciler.status import ReplicaStatus, declare_metrics
from stitch.telemetry import Metrics
from stitch.types import UNCONSTRAINED, Label, Phase, Ref, ReplicaState

DROP_IN_KEYS = {
    "ready",
    "applied",
    "sync_state",
    "reason",
    "run_id",
    "commit_mode",
    "active_requests",
    "update_destination_ready",
    "update_destination_error",
    "terminal_error",
    "metrics",
}


def make_status(**config: object) -> ReplicaStatus:
    env, metrics = Env(), Metrics()
    declare_metrics(metrics)
    settings = ReplicaConfig(replica_id="r", work_dir=Path("unused"), **config)  # type: ignore[arg-type]
    status = ReplicaStatus(env, settings, AdmissionGate(env), metrics)
    status.begin_incarnation("life-1")
    status.gate.on_change = status.changed
    return status


class HeldClock(SystemClock):
    """Its timeouts run out when the test says so."""

    def __init__(self) -> None:
        self._now = 0.0
        self._open: list[asyncio.Timeout] = []

    def monotonic(self) -> float:
        return self._now

    def timeout(self, seconds: float | None) -> asyncio.Timeout:
        assert seconds == 1.0
        self._open.append(asyncio.timeout(None))
        return self._open[-1]

    def beat(self) -> None:
        """A second passes."""
        self._now += 1.0
        due, self._open = self._open, []
        for timeout in due:
            timeout.reschedule(0.0)


def serve(status: ReplicaStatus, version: int) -> None:
    status.booted = status.known = status.latched = True
    status.gate.open(Label(Ref("run-a", version), 1))
    status.succeed()


def test_the_drop_in_keys_are_there_from_the_start() -> None:
    info = make_status().server_info()
    assert info.keys() >= DROP_IN_KEYS
    assert info["applied"] is None
    assert info["run_id"] is None
    assert info["ready"] is False
    assert info["state"] == "BOOTING"


def test_what_is_served_shows_as_text_and_numbers() -> None:
    status = make_status(run_id="run-a")
    serve(status, 3)
    status.latest = Ref("run-a", 5)
    info = status.server_info()
    assert info["applied"] == "run-a/weight_v000003"
    assert info["served"] == {"run_id": "run-a", "version": 3}
    assert info["lag"] == 2
    assert info["ready"] is True
    status.phase = Phase.ACTIVATING
    assert status.server_info()["sync_state"] == "COMMITTING"


def test_an_error_shows_until_a_pass_succeeds_and_is_remembered() -> None:
    status = make_status()
    serve(status, 1)
    status.fail(NotVisibleYet("version 2 is not there"))
    info = status.server_info()
    assert info["sync_state"] == "ERROR"
    assert info["reason"] == "NotVisibleYet: version 2 is not there"
    assert info["ready"] is True
    status.succeed()
    info = status.server_info()
    assert info["sync_state"] == "IDLE"
    assert info["reason"] is None
    assert info["last_error"]["code"] == "NotVisibleYet"


def test_health_says_what_it_waits_for() -> None:
    status = make_status()
    assert status.health() == (False, "preparing: the engine's weights are not proven yet")
    status.booted = status.known = True
    assert str(status.health()[1]).startswith("catching up")
    serve(status, 1)
    assert status.health() == (True, None)
    status.known = False
    assert status.state is ReplicaState.UNKNOWN
    assert status.report().served is None, "the gate may have the next label already"
    assert str(status.health()[1]).startswith("recovering")
    status.swapping = True
    assert status.health() == (True, None), "an activation within its bound is not a failure"
    status.terminal = "the engine is gone"
    assert status.health() == (False, "broken: the engine is gone")
    assert status.state is ReplicaState.FAILED


def test_a_replica_without_a_run_says_what_to_do() -> None:
    status = make_status()
    status.booted = status.known = True
    status.succeed()
    ready, reason = status.health()
    assert not ready
    assert str(reason).startswith("no run is claimed: ")
    assert "publish a version, or start the replica with a run id" in str(reason)
    assert status.report().reason == status.server_info()["reason"] == reason
    status.latest = Ref("run-a", 1)
    assert status.health() == (False, "catching up")
    told = make_status(run_id="run-a")
    told.booted = told.known = True
    told.succeed()
    assert told.health() == (False, "catching up")


def test_lag_can_withdraw_readiness() -> None:
    status = make_status(ready_lag_max=2)
    serve(status, 1)
    status.latest = Ref("run-a", 3)
    assert status.health()[0]
    status.latest = Ref("run-a", 4)
    assert not status.health()[0]


def test_seq_grows_with_content_only() -> None:
    status = make_status()
    first = status.report()
    assert status.report().seq == first.seq
    serve(status, 1)
    second = status.report()
    assert second.seq == first.seq + 1
    assert second.event_id == f"life-1:{second.seq}"
    status.begin_incarnation("life-2")
    assert status.report().event_id == "life-2:1"


async def test_reports_coalesce_and_start_with_the_present() -> None:
    status = make_status()
    reports = status.reports()
    assert (await anext(reports)).served is None
    for version in range(1, 50):
        serve(status, version)
    report = await anext(reports)
    assert report.served == Ref("run-a", 49)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(reports), 0.01)
    await reports.aclose()  # type: ignore[attr-defined]
    assert status._listeners == []


async def test_load_makes_a_report_by_itself_at_most_once_a_second() -> None:
    status = make_status()
    serve(status, 1)
    clock = HeldClock()
    status.env = Env(clock=clock)
    reports = status.reports()
    first = await anext(reports)
    lease = status.gate.try_admit(UNCONSTRAINED)
    assert lease is not None
    task = asyncio.ensure_future(anext(reports))
    await asyncio.sleep(0)
    assert not task.done(), "load alone waits for the next beat"
    clock.beat()
    loaded = await task
    assert (loaded.running, loaded.seq) == (1, first.seq + 1)
    task = asyncio.ensure_future(anext(reports))
    for _ in range(3):
        await asyncio.sleep(0)
        clock.beat()
    assert not task.done(), "the same load is no report"
    status.gate.release(lease)
    clock.beat()
    idle = await task
    assert (idle.running, idle.seq) == (0, first.seq + 2)
    await reports.aclose()  # type: ignore[attr-defined]


def test_metrics_are_prometheus_text() -> None:
    status = make_status()
    serve(status, 7)
    lease = status.gate.try_admit(UNCONSTRAINED)
    assert lease is not None
    status.metrics.observe("stitch_replica_swap_seconds", 0.004)
    status.refresh_gauges()
    lines = status.metrics.text().splitlines()
    assert "stitch_replica_served_version 7" in lines
    assert "stitch_replica_running 1" in lines
    assert 'stitch_replica_state{state="READY"} 1' in lines
    assert 'stitch_replica_swap_seconds_bucket{le="0.005"} 1' in lines
    assert "stitch_replica_swap_seconds_count 1" in lines
    status.gate.open(None)
    status.refresh_gauges()
    assert "stitch_replica_served_version 7" not in status.metrics.text()


def test_metrics_stay_bounded_and_never_raise() -> None:
    metrics = Metrics()
    metrics.counter("hits_total", 'Hits, by "path"\nand more.')
    for index in range(5000):
        metrics.add("hits_total", path=f'/a"{index}\n')
    metrics.add("undeclared")
    metrics.set("undeclared", 1.0)
    metrics.observe("undeclared", float("nan"))
    text = metrics.text()
    assert text.count("hits_total{") == 2000
    assert 'path="/a\\"0\\n"' in text
    assert "stitch_metrics_dropped_total 300" in text


@pytest.mark.parametrize(
    "wrong",
    [
        {"replica_id": ""},
        {"boot_version": -1},
        {"run_id": "a/b"},
        {"poll_s": -1.0},
        {"poll_jitter": 2.0},
    ],
)
def test_bad_configuration_is_refused(wrong: dict[str, object]) -> None:
    settings = {"replica_id": "r", "work_dir": Path("unused")} | wrong
    with pytest.raises(InvalidInput):
        ReplicaConfig(**settings)  # type: ignore[arg-type]
