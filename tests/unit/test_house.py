"""House rules that no linter knows: import directions, sizes, banned calls and words."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "stitch"

# Lower rows may import from higher rows only (docs/architecture.md, "Folder map").
LAYERS: list[set[str]] = [
    {"types", "errors", "env", "telemetry", "_core"},
    {"checksum", "delta", "layout"},
    {"format"},
    {"stores", "engines", "pools"},
    {"destinations"},
    {"admission"},
    {"publisher", "reconciler"},
    {"http"},
    {"sidecar", "gateway"},
    {"client", "trainers", "rl", "local", "profile", "simulate"},
    {"testing", "demo"},
    {"commands"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60

# Code outside the package, which the limit of lines binds as well.
CODE = {
    "tests": {".py", ".cpp", ".hpp"},
    "bench": {".py"},
    "cookbook": {".py"},
    "kernels": {".py"},
    "csrc": {".cpp", ".hpp", ".cu"},
}

# The outside comes through `stitch.env` alone. Places that are the outside, or start processes:
OUTSIDE_ALLOWED = (
    "env.py",
    "testing/",
    "commands/",
    "engines/embedded/",
    "demo/",
    "local/",
    "cli.py",
)
BANNED_CALLS = {
    "time.time",
    "time.monotonic",
    "time.sleep",
    "time.perf_counter",
    "random.random",
    "random.uniform",
    "asyncio.to_thread",
    "asyncio.sleep",
}
BANNED_WORDS = re.compile(
    r"/work/|/tmp/brief|\bsubagent|\bhelper-\d|\bchatgpt\b|\bclaude\b", re.IGNORECASE
)
# Folders whose text is not ours to write: builds, caches, recorded data.
NOT_WRITTEN = {
    "build",
    ".venv",
    ".git",
    "data",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    "dist",
}
BANNED_MODULES = {"utils", "common", "misc", "helpers"}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def other_code() -> list[Path]:
    return sorted(
        path
        for top, kinds in CODE.items()
        for path in (ROOT / top).rglob("*")
        if path.suffix in kinds
        and path.is_file()
        and not NOT_WRITTEN & set(path.relative_to(ROOT).parts)
    )


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def part_of(module: str) -> str | None:
    pieces = module.split(".")
    return pieces[1] if pieces[0] == "stitch" and len(pieces) > 1 else None


def imports_of(tree: ast.AST) -> list[tuple[int, str]]:
    """Every `stitch.*` module imported at run time as (line, dotted name)."""
    typing_only: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            typing_only.update(id(inner) for inner in ast.walk(node))
    found = []
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "stitch":
                found += [(node.lineno, f"stitch.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module))
    return [(line, name) for line, name in found if name.startswith("stitch.")]


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_imports_point_up_the_folder_map(path: Path) -> None:
    here = relative(path).split("/")[0].removesuffix(".py")
    if here == "__init__":
        return
    assert here in LEVEL, f"{here} has no place in the folder map"
    for line, name in imports_of(ast.parse(path.read_text())):
        part = part_of(name)
        if part is None or part == here or part in {"__version__"}:
            continue
        assert part in LEVEL, f"{relative(path)}:{line} imports {name}, which is not in the map"
        assert LEVEL[part] <= LEVEL[here], f"{relative(path)}:{line} imports {name}, a lower row"


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_sizes(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= FILE_LINES_MAX, f"{relative(path)} is over {FILE_LINES_MAX} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES_MAX, (
                f"{relative(path)}:{node.lineno} {node.name} has {length} lines"
            )


def test_no_other_file_is_too_long() -> None:
    found = other_code()
    assert {path.relative_to(ROOT).parts[0] for path in found} == set(CODE)
    lengths = {path.relative_to(ROOT).as_posix(): path.read_text().count("\n") for path in found}
    too_long = {name: lines for name, lines in lengths.items() if lines > FILE_LINES_MAX}
    assert not too_long, f"over {FILE_LINES_MAX} lines: {too_long}"


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_the_outside_comes_through_env(path: Path) -> None:
    if relative(path).startswith(OUTSIDE_ALLOWED):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        assert name not in BANNED_CALLS, f"{relative(path)}:{node.lineno} calls {name}"
        assert name != "open", f"{relative(path)}:{node.lineno} opens a file outside env"
        assert name != "print", f"{relative(path)}:{node.lineno} prints"


def test_no_module_is_a_drawer() -> None:
    for path in sources():
        assert path.stem not in BANNED_MODULES, f"{relative(path)} names no idea"


def test_every_module_says_what_it_is() -> None:
    for path in sources():
        assert ast.get_docstring(ast.parse(path.read_text())), f"{relative(path)} has no docstring"


def test_nothing_is_left_unfinished() -> None:
    marks = re.compile(r"NotImplementedError|\bTODO\b|\bFIXME\b|\bXXX\b")
    for path in sources():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not marks.search(line), (
                f"{relative(path)}:{number} is unfinished: {line.strip()}"
            )


def tracked_text() -> list[Path]:
    kinds = {".py", ".md", ".cpp", ".hpp", ".h", ".cu", ".toml", ".txt", ".sh", ".json", ""}
    found = []
    for top in ROOT.iterdir():
        if top.name in NOT_WRITTEN or (top.name.startswith(".") and top.name != ".ci"):
            continue
        paths = [top] if top.is_file() else [p for p in top.rglob("*") if p.is_file()]
        found += [p for p in paths if p.suffix in kinds and not NOT_WRITTEN & set(p.parts)]
    return found


def test_text_speaks_of_the_project_alone() -> None:
    for path in tracked_text():
        if path == Path(__file__):
            continue
        text = path.read_text(errors="replace")
        match = BANNED_WORDS.search(text)
        assert match is None, f"{path.relative_to(ROOT)}: {match[0]!r}" if match else ""
