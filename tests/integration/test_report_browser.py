"""The demo's HTML report in a real browser: self-contained, complete, no script errors."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

REPORT = Path(__file__).resolve().parents[2] / "build" / "demo" / "report.html"
CHROMIUM = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
]


def chromium(profile: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("chromium")
    assert program, "chromium is not installed; `make browser` installs it"
    command = [program, *CHROMIUM, f"--user-data-dir={profile}", *arguments, REPORT.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


def test_the_rendered_report_shows_every_part(tmp_path: Path) -> None:
    assert REPORT.exists(), "no report; run `make demo DEMO_ARGS='--out build/demo'` first"
    done = chromium(tmp_path / "profile", "--dump-dom")
    dom = done.stdout
    for words in ("Reward", "Replicas", "Pause", "Labels"):
        assert words.lower() in dom.lower(), f"the report has no {words} part"
    assert dom.count("<svg") >= 3
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]


def test_the_report_loads_nothing_from_elsewhere() -> None:
    text = REPORT.read_text()
    assert "http://" not in text.replace("http://www.w3.org/", "")
    assert "https://" not in text


def test_a_screenshot_is_not_blank(tmp_path: Path) -> None:
    shot = tmp_path / "report.png"
    chromium(tmp_path / "profile", f"--screenshot={shot}", "--window-size=1200,1600")
    assert shot.stat().st_size > 20_000
