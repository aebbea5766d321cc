"""`stitch store show URL` and `stitch store verify URL`: what a store holds, and if it is sound.

Exit codes: 0 shown, or sound; 1 something in the store is wrong; 2 usage or environment.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from stitch.commands.materialize import thread_count
from stitch.commands.output import print_result
from stitch.commands.store_survey import Problem, RunSurvey, StoreSurvey, survey, verify_run
from stitch.env import Env
from stitch.errors import InvalidInput, Unavailable
from stitch.stores import Store, open_store
from stitch.types import version_name

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="the pointer, runs, versions and sizes")
    verify = actions.add_parser("verify", help="read every file again and check it")
    for action in (show, verify):
        action.add_argument("url", help="the store, as file:///path or an absolute path")
        action.add_argument("--json", action="store_true", help="print JSON")
        action.add_argument("--run-id", help="this run alone")
    verify.add_argument(
        "--deep",
        action="store_true",
        help="rebuild every version and check every tensor; --base where a run starts from one",
    )
    verify.add_argument(
        "--base", type=Path, help="for --deep: the checkpoint that counts as the run's boot version"
    )
    verify.add_argument(
        "--threads", type=thread_count, default=min(8, os.cpu_count() or 1), help="worker threads"
    )


def run(options: argparse.Namespace) -> int:
    """Do it. Returns the exit code."""
    try:
        return asyncio.run(_run(options))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise Unavailable(f"{where}{error.strerror or error}", errno=error.errno) from error


async def _run(options: argparse.Namespace) -> int:
    env = Env()
    store = open_store(options.url, env=env)
    try:
        found = await survey(store, env)
        if not found.runs and not found.problems and not found.pointer_text:
            raise InvalidInput(f"{store.url} holds no store: no pointer, no runs, no versions")
        if options.run_id is not None:
            found.runs = [item for item in found.runs if item.run_id == options.run_id]
            if not found.runs:
                raise InvalidInput(f"{store.url} has no run {options.run_id!r}", param="run_id")
        if options.action == "show":
            print_result(json.dumps(_facts(found)) if options.json else _picture(found))
            return 0
        return await _verify(store, found, options, env)
    finally:
        await store.close()


async def _verify(store: Store, found: StoreSurvey, options: argparse.Namespace, env: Env) -> int:
    problems = [*found.problems, *(p for item in found.runs for p in item.problems)]
    versions = sum(len(item.versions) for item in found.runs)
    shown = sys.stderr is not None and sys.stderr.isatty() and not options.json

    def tell(version: int) -> None:
        if shown:
            print(f"\rreading {version_name(version)} ", end="", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="stitch-verify-") as cache:
        for item in found.runs:
            problems += await verify_run(
                store,
                item,
                env,
                Path(cache),
                base=options.base,
                deep=options.deep,
                threads=options.threads,
                on_version=tell,
            )
    if shown:
        print("\r\033[K", end="", file=sys.stderr)
    if options.json:
        facts = [dataclasses.asdict(problem) for problem in problems]
        print_result(json.dumps({"url": found.url, "versions": versions, "problems": facts}))
    else:
        print_result(_verdict(found, versions, problems, deep=options.deep))
    return 1 if problems else 0


def _verdict(found: StoreSurvey, versions: int, problems: list[Problem], *, deep: bool) -> str:
    foreign = any(version.foreign for item in found.runs for version in item.versions)
    read = "complete; foreign ones carry no file digests" if foreign else "every file as published"
    how = "rebuilt, every digest right" if deep else read
    if not problems:
        return (
            f"{found.url}: {_count(versions, 'version')} of {_count(len(found.runs), 'run')}, {how}"
        )
    lines = [f"{found.url}: {_count(len(problems), 'problem')} in {_count(versions, 'version')}"]
    for problem in problems:
        retry = "yes" if problem.retryable else "no"
        lines.append(f"  {problem.where}: {' '.join(problem.reason.split())}; retry: {retry}")
    return "\n".join(lines)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _facts(found: StoreSurvey) -> dict[str, Any]:
    pointer = found.pointer
    return {
        "url": found.url,
        "pointer": {
            "text": found.pointer_text,
            "run_id": pointer.run_id if pointer is not None else None,
            "version": pointer.version if pointer is not None else None,
        },
        "runs": [
            {
                "run_id": item.run_id,
                "foreign": item.foreign,
                "record": item.record.model_dump(),
                "versions": [dataclasses.asdict(version) for version in item.versions],
                "problems": [dataclasses.asdict(problem) for problem in item.problems],
            }
            for item in found.runs
        ],
        "problems": [dataclasses.asdict(problem) for problem in found.problems],
    }


def _picture(found: StoreSurvey) -> str:
    lines = [f"store    {found.url}", f"pointer  {found.pointer_text or 'none: no run is claimed'}"]
    for problem in found.problems:
        lines.append(f"  ! {problem.where}: {problem.reason}")
    for item in found.runs:
        lines += ["", *_run_lines(item)]
    return "\n".join(lines)


def _run_lines(item: RunSurvey) -> list[str]:
    record = item.record
    facts = [f"boot version {record.boot_version}", f"in {record.updates_dir}/"]
    if item.foreign:
        facts.append("no run record: another trainer's")
    if record.base_digest:
        facts.append(f"base {record.base_digest[:12]}…")
    if record.forked_from is not None:
        facts.append(f"forked from {record.forked_from.run_id} at {record.forked_from.version}")
    lines = [f"run {item.run_id}: {', '.join(facts)}"]
    if item.versions:
        head = f"  {'version':<16} {'kind':<7} {'base':>8} {'encoding':<20}"
        lines.append(f"{head} {'tensors':>8} {'shards':>6} {'data bytes':>16}")
    for version in item.versions:
        encoding = "/".join(filter(None, (version.encoding, version.checksum_format))) or "-"
        base = "-" if version.base_version is None else str(version.base_version)
        note = " (foreign)" if version.foreign and not item.foreign else ""
        note += f" (rollback of {version.rollback_of})" if version.rollback_of else ""
        lines.append(
            f"  {version_name(version.version):<16} {version.kind:<7} {base:>8} {encoding:<20} "
            f"{version.tensors:>8} {version.files:>6} {version.bytes:>16,}{note}"
        )
    lines += [f"  ! {problem.where}: {problem.reason}" for problem in item.problems]
    return lines
