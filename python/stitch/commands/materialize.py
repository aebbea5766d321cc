"""`stitch materialize`: rebuild one version from a base checkpoint and its updates.

Exit codes: 0 written; 1 a publication is at fault; 2 usage or environment. On failure one line
on stderr ends `retry: yes` (what is missing may still become visible) or `retry: no`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stitch.commands.output import print_result
from stitch.env import Env
from stitch.errors import CorruptData, NotVisibleYet, StitchError, Unsupported
from stitch.format.materialize import MaterializeReport, materialize
from stitch.types import VERSION_MAX, Ref, version_name

if TYPE_CHECKING:
    from stitch.cli import CommandParser

__all__ = ["configure", "run", "thread_count"]

_LINE_MAX: Final = 2000


def configure(parser: CommandParser) -> None:
    """Declare the options."""
    parser.add_argument("--base", type=Path, required=True, help="the base checkpoint's directory")
    parser.add_argument(
        "--updates", type=Path, required=True, help="the directory of weight_vNNNNNN publications"
    )
    parser.add_argument("--version", type=_version, required=True, help="the version to rebuild")
    parser.add_argument(
        "--out", type=Path, required=True, help="the directory to write; must not exist"
    )
    parser.add_argument(
        "--base-version", type=_version, default=0, help="the version that the base counts as (0)"
    )
    parser.add_argument(
        "--run-id", type=_run_id, help="the run that Stitch's own publications must be of"
    )
    parser.add_argument(
        "--threads", type=thread_count, default=min(8, os.cpu_count() or 1), help="worker threads"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--quiet", action="store_true", help="print nothing on success")

    parser.error_suffix = "; retry: no"


def run(options: argparse.Namespace) -> int:
    """Do it. Returns the exit code."""
    try:
        with _progress(quiet=options.quiet) as on_progress:
            report = materialize(
                base=options.base,
                updates=options.updates,
                version=options.version,
                out=options.out,
                env=Env(),
                base_version=options.base_version,
                run_id=options.run_id,
                threads=options.threads,
                on_progress=on_progress,
            )
        _tell(report, options)
    except (CorruptData, Unsupported, NotVisibleYet) as error:
        return _fail(error, code=1)
    except StitchError as error:
        return _fail(error, code=2)
    return 0


def _tell(report: MaterializeReport, options: argparse.Namespace) -> None:
    if options.json:
        print_result(json.dumps(dataclasses.asdict(report) | {"out": str(options.out)}))
    elif not options.quiet:
        seed = "the base" if report.seed_version is None else version_name(report.seed_version)
        print_result(
            f"{options.out}: version {report.version}, {report.tensors} tensors, "
            f"{report.bytes_written:,} bytes, from {seed} and {len(report.applied)} deltas; "
            f"model digest {report.model_digest[:16]}…"
        )


def _fail(error: StitchError, *, code: int) -> int:
    retry = "yes" if isinstance(error, NotVisibleYet) else "no"
    line = " ".join(error.message.split())
    if len(line) > _LINE_MAX:  # it may quote a name or shape of any length
        line = f"{line[:_LINE_MAX]}…"
    print(f"stitch materialize: {line}; retry: {retry}", file=sys.stderr)
    return code


def _version(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 16 or int(text) > VERSION_MAX:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a version number")
    return int(text)


def _run_id(text: str) -> str:
    try:
        return Ref(text, 0).run_id
    except StitchError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def thread_count(text: str) -> int:
    """The value of `--threads`. Raises: ArgumentTypeError."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:4]) <= 256:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of threads, 1 to 256")
    return int(text)


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    # sys.stderr is None in a process that was started without one.
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("materialize"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("materialize")
        yield lambda done, total: bar.update(task, completed=done, total=total)
