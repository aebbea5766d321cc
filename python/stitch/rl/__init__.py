"""Bookkeeping between rollouts and learner: trajectories, spans, staleness."""

from __future__ import annotations

from stitch.rl.trajectory import StalenessReport, Trajectory, staleness, token_versions

__all__ = ["StalenessReport", "Trajectory", "staleness", "token_versions"]
