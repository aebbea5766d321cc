"""The documentation points at things that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "cookbook/README.md"]


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page_id(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_tests_exist(page: Path) -> None:
    known = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    files = {path.stem for path in (ROOT / "tests").rglob("*.py")}
    for name in re.findall(r"`(test_\w+)`", page.read_text()):
        assert name in known | files, f"{page_id(page)} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_files_exist(page: Path) -> None:
    pattern = r"`((?:python|csrc|tests|docs|bench|kernels|cookbook|\.ci)/[\w./-]+\.\w+)`"
    for name in re.findall(pattern, page.read_text()):
        assert (ROOT / name).exists(), f"{page_id(page)} names {name}"


def test_every_invariant_has_a_named_test() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*$", text, flags=re.MULTILINE)
    assert [int(n) for n in rows] == list(range(1, 11))
    for line in text.splitlines():
        if re.match(r"\| \d+ \|", line):
            assert "`test_" in line, line
