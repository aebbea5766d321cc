"""Facts that a run should say aloud: counts of checked cases, covered variants."""

from __future__ import annotations

from collections.abc import Callable

import pytest

_FACTS = pytest.StashKey[list[str]]()

Say = Callable[[str], None]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FACTS] = []


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> Say:
    """Adds one line to the facts printed at the end of the run."""
    return pytestconfig.stash[_FACTS].append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    facts = config.stash[_FACTS]
    if facts:
        terminalreporter.section("facts of this run")
        for line in facts:
            terminalreporter.write_line(line)
