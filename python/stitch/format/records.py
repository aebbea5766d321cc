"""Where things lie under a store's root, and the run record that claims a run.

`docs/publication-format.md`, sections "Root layout" and "Run record".
"""

from __future__ import annotations

from typing import Final

from pydantic import ValidationError

from stitch.errors import CorruptData
from stitch.format.strict_json import parse_object
from stitch.format.wire import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    ForkPoint,
    FormatVersion,
    RunRecord,
    refuse_other_major,
    to_json_bytes,
)
from stitch.types import Ref, version_name

__all__ = [
    "FIRST_RUN_KEY",
    "FIRST_UPDATES_DIR",
    "RUN_RECORD_SIZE_MAX",
    "encode_run_record",
    "foreign_run_record",
    "new_run_record",
    "parse_run_record",
    "run_record_key",
    "updates_dir_for",
    "version_prefix",
]

FIRST_UPDATES_DIR: Final = "updates"
# Holds the id of the run that may have `updates`: create-only, so that of runs claimed at once
# only one gets it. No run can have this name.
FIRST_RUN_KEY: Final = "runs/.first"
RUN_RECORD_SIZE_MAX: Final = 64 * 1024


def run_record_key(run_id: str) -> str:
    """Key of a run's record. Raises: InvalidInput for a malformed run id."""
    return f"runs/{Ref(run_id, 0).run_id}/run.json"


def updates_dir_for(run_id: str, *, first: bool) -> str:
    """Where a new run's versions lie: today's readers look for the first run's in `updates`."""
    return FIRST_UPDATES_DIR if first else f"runs/{Ref(run_id, 0).run_id}/updates"


def version_prefix(record: RunRecord, version: int) -> str:
    """Key prefix of one version's directory, without a trailing slash."""
    return f"{record.updates_dir}/{version_name(version)}"


def new_run_record(
    run_id: str,
    *,
    first: bool,
    boot_version: int,
    base_digest: str | None,
    writer: str,
    forked_from: ForkPoint | None = None,
) -> RunRecord:
    """The record that a publisher writes, create-only, to claim `run_id`."""
    return RunRecord(
        format=FormatVersion(major=FORMAT_MAJOR, minor=FORMAT_MINOR),
        run_id=run_id,
        boot_version=boot_version,
        base_digest=base_digest,
        forked_from=forked_from,
        writer=writer,
        updates_dir=updates_dir_for(run_id, first=first),
    )


def foreign_run_record(run_id: str, *, boot_version: int = 0) -> RunRecord:
    """The stand-in for a root whose `updates/` belongs to another trainer: it has no run.json."""
    return new_run_record(
        run_id, first=True, boot_version=boot_version, base_digest=None, writer="foreign"
    )


def encode_run_record(record: RunRecord) -> bytes:
    """The bytes of `run.json`."""
    return to_json_bytes(record)


def parse_run_record(data: bytes, run_id: str) -> RunRecord:
    """Decode `runs/<run_id>/run.json`.

    Raises: Unsupported for another format major; CorruptData for anything malformed, or a
        record of another run.
    """
    where = run_record_key(run_id)
    raw = parse_object(data, where=where, size_max=RUN_RECORD_SIZE_MAX)
    refuse_other_major(raw, where=where)
    try:
        record = RunRecord.model_validate(raw)
    except ValidationError as error:
        reason = first_fault(error)
        raise CorruptData(f"{where}: {reason}", file=where, reason=reason) from error
    if record.run_id != run_id:
        reason = f"it is the record of run {record.run_id!r}"
        raise CorruptData(f"{where}: {reason}", file=where, reason=reason)
    return record


def first_fault(error: ValidationError) -> str:
    """The first thing wrong with a document, as `field: reason`."""
    fault = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in fault['loc'])[:200]}: {fault['msg']}"
