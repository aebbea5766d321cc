"""`stitch bootstrap`: materialize the newest version that a store names, before an engine starts.

Exit codes: 0 written; 1 a publication is at fault; 2 usage or environment. On failure one line
on stderr ends `retry: yes` (it may still become visible) or `retry: no`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from stitch.env import Env
from stitch.errors import CorruptData, NotVisibleYet, StitchError, Unsupported
from stitch.reconciler.bootstrap import Bootstrapped, bootstrap
from stitch.stores import Store, open_store
from stitch.types import Ref

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--base", type=Path, required=True, help="the run's base checkpoint")
    parser.add_argument("--store", required=True, help="the store's URL, file:///path")
    parser.add_argument(
        "--out", type=Path, required=True, help="the directory to write; must not exist"
    )
    parser.add_argument("--run-id", type=_run_id, help="the run that the store must name")
    parser.add_argument(
        "--threads", type=_threads, default=min(8, os.cpu_count() or 1), help="worker threads"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace) -> int:
    """Do it. Returns the exit code."""
    env = Env()
    try:
        store = open_store(options.store, env=env)
    except StitchError as error:
        return _fail(error, code=2, retry="no")
    try:
        done = asyncio.run(_bootstrap(options, store, env))
    except NotVisibleYet as error:
        return _fail(error, code=1, retry="yes")
    except (CorruptData, Unsupported) as error:
        return _fail(error, code=1, retry="no")
    except StitchError as error:
        return _fail(error, code=2, retry="no")
    if options.json:
        facts = {
            "run_id": done.ref.run_id,
            "version": done.ref.version,
            "model_digest": done.model_digest,
            "base": done.base,
            "applied": done.applied,
            "linked": done.linked,
            "out": str(done.directory),
        }
        print(json.dumps(facts))
    else:
        how = "linked from the base" if done.linked else f"{done.applied} publications applied"
        print(
            f"{done.directory}: {done.ref}, {how}, base {done.base}; "
            f"model digest {done.model_digest[:16]}…"
        )
    return 0


async def _bootstrap(options: argparse.Namespace, store: Store, env: Env) -> Bootstrapped:
    try:
        return await bootstrap(
            store,
            options.base,
            options.out,
            env,
            run_id=options.run_id,
            threads=options.threads,
        )
    finally:
        await store.close()


def _fail(error: StitchError, *, code: int, retry: str) -> int:
    line = " ".join(error.message.split())
    print(f"stitch bootstrap: {line}; retry: {retry}", file=sys.stderr)
    return code


def _run_id(text: str) -> str:
    try:
        return Ref(text, 0).run_id
    except StitchError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def _threads(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:4]) <= 256:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of threads, 1 to 256")
    return int(text)
