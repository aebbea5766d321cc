"""`stitch demo`: a small asynchronous RL job with replicas that die and join.

Exit code 0 if every check passed, 1 if one failed, 2 if the run could not be carried out, 130
if it was interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stitch.env import Env
from stitch.errors import InvalidInput
from stitch.types import ActivationMode

if TYPE_CHECKING:
    from rich.console import Console

    from stitch.demo.run import Outcome

__all__ = ["configure", "run"]

_DETAIL_COLUMN: Final = 40


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--replicas", type=int, default=3, help="how many at the start (3)")
    parser.add_argument("--steps", type=int, default=60, help="trainer steps (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the tasks (0)")
    parser.add_argument(
        "--lr", type=float, default=1e-3, help="learning rate (0.001); 0 must fail the reward check"
    )
    parser.add_argument(
        "--mode", choices=[mode.value for mode in ActivationMode], default="recompute",
        help="what a new version does with requests in flight (recompute)",
    )  # fmt: skip
    parser.add_argument("--no-chaos", action="store_true", help="kill no replica")
    parser.add_argument("--keep", action="store_true", help="leave the pool running at the end")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"),
        help="directory for report, store and logs; an earlier demo's is replaced (demo-out)",
    )  # fmt: skip
    parser.add_argument(
        "--shift-labels", type=int, default=0, metavar="N",
        help="falsify the labels by N versions before the check, which must fail (0)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run the demo. Returns the exit code."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is made here
    try:
        from rich.console import Console

        from stitch.demo.run import run_demo
        from stitch.demo.settings import DemoSettings
        from stitch.demo.view import open_view
    except ModuleNotFoundError as error:
        raise InvalidInput(f"{error.name} is missing; install stitch-rl[torch]") from error
    settings = DemoSettings(
        out=options.out,
        replicas=options.replicas,
        steps=options.steps,
        seed=options.seed,
        lr=options.lr,
        chaos=not options.no_chaos,
        keep=options.keep,
        mode=options.mode,
        shift_labels=options.shift_labels,
    )
    console = Console(stderr=options.json)

    def done(outcome: Outcome, url: str | None) -> None:
        _summarize(outcome, console)
        if options.json:
            sys.stdout.write(_json(outcome) + "\n")
            sys.stdout.flush()
        if url is not None:
            console.print(f"the pool stays at {url}; press Ctrl-C to end it", markup=False)
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()

    try:
        outcome = run_demo(settings, open_view(settings, console), env=Env(), on_done=done)
    except KeyboardInterrupt:
        sys.stderr.write(_interrupted(settings.out.absolute()))
        return 130
    return 0 if outcome.passed else 1


def _interrupted(out: Path) -> str:
    """Where to look after Ctrl-C: the run has replaced an earlier one's files."""
    report = out / "report.html"
    written = f"the report is {report}" if report.exists() else "no report was written"
    return f"stitch demo: interrupted; {written}; logs are in {out / 'logs'}\n"


def _summarize(outcome: Outcome, console: Console) -> None:
    from rich.markup import escape

    from stitch.demo.report import summary_rows

    def say(style: str, word: str, name: str, detail: str) -> None:
        # A terminal would break lines in the middle of words; a file is no place for breaks.
        room = max(20, console.width - _DETAIL_COLUMN) if console.is_terminal else 10_000
        first, *rest = textwrap.wrap(detail, room, break_on_hyphens=False) or [""]
        console.print(f"[{style}]{word:>7}[/{style}]  {name:<30} {escape(first)}", soft_wrap=True)
        for line in rest:
            console.print(f"{'':{_DETAIL_COLUMN}}{line}", markup=False, soft_wrap=True)

    for name, detail in summary_rows(outcome.record):
        say("dim", "", name, detail)
    for check in outcome.checks:
        word = "ok" if check.passed else "FAILED" if check.required else "missed"
        style = "green" if check.passed else "red" if check.required else "yellow"
        say(style, word, check.name, check.detail)
    console.print(f"report: {outcome.report_path}", markup=False, soft_wrap=True, highlight=False)


def _json(outcome: Outcome) -> str:
    from stitch.demo.report import pause_rows

    return json.dumps(
        {
            "passed": outcome.passed,
            "checks": {check.name: [check.passed, check.detail] for check in outcome.checks},
            "labels": outcome.labels.to_wire(),
            "latest": str(outcome.latest),
            "pauses": [list(row) for row in pause_rows(outcome.record)],
            "steps": len(outcome.record.steps),
            "seconds": round(outcome.record.now_s, 1),
            "report": str(outcome.report_path),
        }
    )
