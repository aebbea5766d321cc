"""`stitch status`: where a store's pointer stands, and how the replicas behind a gateway are doing.

Exit codes: 0 shown; 1 the pool is not ready or the store has a problem; 2 usage or environment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any, Final

from stitch.client import AsyncClient, ClientConfig
from stitch.commands.store_survey import survey
from stitch.env import Env
from stitch.errors import InvalidInput, StitchError
from stitch.stores import open_store

__all__ = ["configure", "run"]

_WATCH_S: Final = 2.0
_ANSWER_S: Final = 5.0
_COLUMNS: Final = ("replica", "state", "phase", "gate", "version", "lag", "in flight", "problem")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--store", help="URL of a store, such as file:///path")
    parser.add_argument("--gateway", help="base URL of a gateway, such as http://127.0.0.1:8000")
    parser.add_argument("--json", action="store_true", help="one JSON object (a line each time)")
    parser.add_argument("--watch", action="store_true", help="again every two seconds")


def run(options: argparse.Namespace) -> int:
    """Show it. Returns the exit code."""
    if options.store is None and options.gateway is None:
        raise InvalidInput("give --store URL, --gateway URL, or both", param="store")
    while True:
        found = asyncio.run(_look(options.store, options.gateway))
        text = json.dumps(found) if options.json else _picture(found)
        if options.watch and not options.json and sys.stdout.isatty():
            text = f"\x1b[H\x1b[2J{text}"
        print(text, flush=True)
        if not options.watch:
            return 0 if _is_well(found) else 1
        time.sleep(_WATCH_S)


async def _look(store_url: str | None, gateway_url: str | None) -> dict[str, Any]:
    env = Env()
    found: dict[str, Any] = {}
    if store_url is not None:
        found["store"] = await _look_at_store(store_url, env)
    if gateway_url is not None:
        config = ClientConfig(deadline_s=_ANSWER_S)
        async with AsyncClient(gateway_url, config=config, env=env) as client:
            try:
                found["gateway"] = await client.get("/status")
            except StitchError as error:
                raise InvalidInput(
                    f"no gateway answers at {gateway_url}: {error.message}", param="gateway"
                ) from error
    return found


async def _look_at_store(url: str, env: Env) -> dict[str, Any]:
    store = open_store(url, env=env)
    try:
        seen = await survey(store, env)
        leases = await store.read_leases()
    finally:
        await store.close()
    pointer = seen.pointer
    return {
        "url": seen.url,
        "pointer": seen.pointer_text,
        "latest": None if pointer is None else pointer.to_wire(),
        "runs": [
            {
                "run_id": item.run_id,
                "boot_version": item.record.boot_version,
                "versions": len(item.versions),
                "newest": max((v.version for v in item.versions), default=None),
            }
            for item in seen.runs
        ],
        "leases": sorted(leases),
        "problems": [
            f"{problem.where}: {problem.reason}"
            for problem in [*seen.problems, *(p for item in seen.runs for p in item.problems)]
        ],
    }


def _is_well(found: dict[str, Any]) -> bool:
    store, gateway = found.get("store"), found.get("gateway")
    return not (store and store["problems"]) and (gateway is None or bool(gateway.get("ready")))


def _picture(found: dict[str, Any]) -> str:
    lines: list[str] = []
    if "store" in found:
        lines += _store_lines(found["store"])
    if "gateway" in found:
        lines += ([""] if lines else []) + _gateway_lines(found["gateway"])
    return "\n".join(lines)


def _store_lines(store: dict[str, Any]) -> list[str]:
    lines = [
        f"store    {store['url']}",
        f"pointer  {store['pointer'] or _no_pointer(store)}",
    ]
    for item in store["runs"]:
        newest = "none yet" if item["newest"] is None else f"newest {item['newest']}"
        lines.append(
            f"run      {item['run_id']}: {item['versions']} versions, {newest}, boot version "
            f"{item['boot_version']}"
        )
    if store["leases"]:
        lines.append(f"leases   {', '.join(store['leases'])}")
    return lines + [f"problem  {problem}" for problem in store["problems"]]


def _no_pointer(store: dict[str, Any]) -> str:
    if store["runs"] or store["problems"]:
        return "none: nothing is published yet"
    return "none: no trainer has claimed a run here yet"


def _gateway_lines(gateway: dict[str, Any]) -> list[str]:
    ready = "ready" if gateway.get("ready") else f"not ready: {gateway.get('reason')}"
    lines = [
        f"gateway  {ready}",
        f"latest   {_ref(gateway.get('latest'))}",
        f"load     {gateway.get('in_flight', 0)} in flight, {gateway.get('waiting', 0)} waiting",
        "",
    ]
    rows = [_COLUMNS, *(_member_row(member) for member in gateway.get("members", []))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return lines


def _member_row(member: dict[str, Any]) -> tuple[str, ...]:
    report = member.get("report") or {}
    served = member.get("served")
    problem = member.get("problem") or report.get("reason") or ""
    if member.get("state") == "UNREACHABLE" and not member.get("problem"):
        age = member.get("report_age_s")
        problem = "does not answer" + ("" if age is None else f"; last report {age:.0f} s ago")
    return (
        str(member.get("id", "?")),
        str(member.get("state") or "?"),
        str(member.get("phase") or ""),
        str(member.get("gate") or ""),
        "unknown" if served is None else str(served["version"]),
        "" if member.get("lag") is None else str(member["lag"]),
        str(member.get("in_flight", "")),
        str(problem),
    )


def _ref(raw: Any) -> str:
    return f"{raw['run_id']} version {raw['version']}" if isinstance(raw, dict) else "unknown"
