"""`stitch demo` as a user runs it, cut short: its checks must fail where they should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(240)]


def demo(out: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "stitch.cli", "demo", "--json", "--out", str(out), *arguments],
        capture_output=True,
        text=True,
        timeout=230,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def test_without_learning_only_the_reward_check_fails(tmp_path: Path) -> None:
    code, found, _ = demo(
        tmp_path / "out", "--lr", "0", "--steps", "12", "--replicas", "1", "--no-chaos"
    )
    assert code == 1
    verdicts = {name: passed for name, (passed, _) in found["checks"].items()}
    assert not verdicts["reward rose"]
    assert verdicts["labels are true"]
    assert verdicts["replicas converged"]


def test_a_shifted_label_fails_the_label_check_and_chaos_is_survived(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, found, errors = demo(out, "--shift-labels", "1", "--steps", "6", "--replicas", "2")
    assert code == 1
    verdicts = {name: passed for name, (passed, _) in found["checks"].items()}
    assert not verdicts["labels are true"]
    assert verdicts["replicas converged"]
    assert verdicts["a killed replica was replaced"], errors
    assert found["labels"]["accepted"] == 0
    page = (out / "report.html").read_text()
    assert page.count("<svg") >= 3
    assert json.loads((out / "report.json").read_text())["passed"] is False


def test_a_directory_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    done = subprocess.run(
        [sys.executable, "-m", "stitch.cli", "demo", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--out" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert (tmp_path / "mine.txt").read_text() == "keep"
