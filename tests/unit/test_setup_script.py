"""`.ci/setup`: what it makes of pip's words."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP = """#!/bin/sh
echo "WARNING: Location '/gone' is ignored: it is either a non-existing path." >&2
echo "ERROR: no such package" >&2
echo collected
exit "${PIP_STATUS}"
"""


@pytest.mark.parametrize("status", [0, 3])
def test_pip_is_quiet_about_ignored_locations_alone(tmp_path: Path, status: int) -> None:
    text = (ROOT / ".ci" / "setup").read_text()
    function = text[text.index("pip() {") :].partition("\n}\n")[0] + "\n}\n"
    fake = tmp_path / ".venv" / "bin" / "python"
    fake.parent.mkdir(parents=True)
    fake.write_text(PIP)
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{function}pip install thing\necho went on"],
        cwd=tmp_path,
        env={"PIP_STATUS": str(status), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stderr == "ERROR: no such package\n"
    assert done.stdout == ("collected\nwent on\n" if status == 0 else "collected\n")
    assert done.returncode == status
