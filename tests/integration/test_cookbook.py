"""Every program of the cookbook runs as it stands and says what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COOKBOOK = Path(__file__).resolve().parents[2] / "cookbook"
LAST_LINES = {
    "async_loop.py": "live on 2 replicas",
    "rollback.py": "version 1 differs: True",
}

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(180)]


def test_every_program_is_listed() -> None:
    assert {path.name for path in COOKBOOK.glob("*.py")} == set(LAST_LINES)
    page = (COOKBOOK / "README.md").read_text()
    assert all(f"`{name}`" in page for name in LAST_LINES)


@pytest.mark.parametrize("name", sorted(LAST_LINES))
def test_it_runs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, COOKBOOK / name], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == LAST_LINES[name]
    assert "agree: False" not in done.stdout
