"""One replica: an engine, its gate, and the loop that brings it to the store's pointer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from stitch.admission import AdmissionGate
from stitch.engines.base import Engine
from stitch.env import Env
from stitch.errors import Closed, ReplicaLost, Unsupported
from stitch.reconciler.base import ReplicaReport
from stitch.reconciler.config import DestinationFactory, ReplicaConfig
from stitch.reconciler.driver import Driver
from stitch.reconciler.status import ReplicaStatus, declare_metrics
from stitch.stores.base import Store
from stitch.telemetry import Metrics
from stitch.types import Unmet

__all__ = ["Replica"]


class Replica:
    """Implements `ReplicaView`. Make it, start its sidecar, then `await run()`.

    `run` returns only by cancellation or by ReplicaLost, after which the replica stays
    readable (state FAILED, never ready) so that its process can say why before it ends.
    Raises: Unsupported if the engine does not offer the configured activation mode.
    """

    def __init__(
        self,
        store: Store,
        engine: Engine,
        destination_factory: DestinationFactory,
        config: ReplicaConfig,
        env: Env,
    ) -> None:
        modes = engine.capabilities.modes
        if config.mode not in modes:
            raise Unsupported(
                f"this engine cannot activate in mode {config.mode.value!r}; it offers "
                f"{', '.join(sorted(mode.value for mode in modes))}",
                param="mode",
            )
        self._env = env
        self._engine = engine
        self._gate = AdmissionGate(env, config.gate)
        metrics = Metrics()
        declare_metrics(metrics)
        self._status = ReplicaStatus(env, config, self._gate, metrics)
        self._status.begin_incarnation(env.random.nonce())
        self._driver = Driver(store, engine, destination_factory, self._status, env)
        self._gate.on_change = self._status.changed
        self._gate.on_refused = self._refused

    @property
    def gate(self) -> AdmissionGate:
        return self._gate

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def status(self) -> ReplicaStatus:
        """For tests and the process that hosts the replica; read only."""
        return self._status

    def report(self) -> ReplicaReport:
        return self._status.report()

    def reports(self) -> AsyncIterator[ReplicaReport]:
        return self._status.reports()

    def server_info(self) -> dict[str, Any]:
        return self._status.server_info()

    def health(self) -> tuple[bool, str | None]:
        return self._status.health()

    def wake(self) -> None:
        self._driver.wake()

    def metrics(self) -> str:
        self._status.refresh_gauges()
        return self._status.metrics.text()

    async def run(self) -> None:
        """Boot, prove, converge, supervise; until cancelled.

        Raises: ReplicaLost when the replica must be replaced.
        """
        try:
            await self._driver.run()
        except ReplicaLost as error:
            self._status.terminal = error.message
            self._status.fail(error)
            raise
        finally:
            await asyncio.shield(self._driver.close())

    async def drain(self, deadline_s: float) -> None:
        self._status.draining = True
        self._driver.stop()
        error = Closed("this replica is leaving its pool; another one can serve the request")
        self._gate.refuse(error)
        if not await self._gate.drained(deadline_s):
            self._gate.abort_all(error)

    def _refused(self, unmet: Unmet) -> None:
        self._status.metrics.add("stitch_replica_refused_total", reason=unmet.value)
        if unmet is Unmet.BEHIND:
            self._driver.wake()
