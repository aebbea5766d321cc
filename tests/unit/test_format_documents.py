"""Stored documents: strict JSON, run records, file names, schemas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stitch.errors import CorruptData, InvalidInput, Unsupported
from stitch.format import records
from stitch.format.schemas import document_schemas
from stitch.format.strict_json import parse_object
from stitch.format.wire import ForkPoint

SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "schemas"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b"[]", "object is needed"),
        (b"null", "object is needed"),
        (b'{"a": 1, "a": 1}', "duplicate name 'a'"),
        (b'{"a": {"b": [{"c": 1, "c": 2}]}}', "duplicate name 'c'"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": "\\ud800"}', "Unicode"),
        (b'{"\\udc00": 1}', "Unicode"),
        (b'{"a": "\xff"}', "Unicode"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"a": ' + b"[" * 200_000, "nested too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"{} {}", "not JSON"),
        (b'{"a": 1,}', "not JSON"),
        (b'{"a": "' + b"x" * 100 + b'"}', "at most 99"),
    ],
)
def test_json_that_is_refused(data: bytes, reason: str) -> None:
    size_max = 99 if reason == "at most 99" else 1 << 20
    with pytest.raises(CorruptData, match=reason) as caught:
        parse_object(data, where="index", size_max=size_max)
    assert caught.value.fields["file"] == "index"


def test_json_that_is_taken() -> None:
    data = '{"größe": [1, -2.5e3, null, true, {"😀": ""}]}'.encode()
    assert parse_object(data, where="x", size_max=100) == json.loads(data)


def test_run_record_round_trip() -> None:
    record = records.new_run_record(
        "run-2",
        first=False,
        boot_version=7,
        base_digest="0" * 64,
        writer="abc",
        forked_from=ForkPoint(run_id="run-1", version=7, manifest_digest=None),
    )
    data = records.encode_run_record(record)
    assert records.parse_run_record(data, "run-2") == record
    assert record.updates_dir == "runs/run-2/updates"
    assert records.version_prefix(record, 8) == "runs/run-2/updates/weight_v000008"
    assert records.run_record_key("run-2") == "runs/run-2/run.json"
    first = records.new_run_record(
        "run-1", first=True, boot_version=0, base_digest=None, writer="abc"
    )
    assert records.version_prefix(first, 1_000_000) == "updates/weight_v1000000"
    assert records.foreign_run_record("run-a1").updates_dir == "updates"


def test_a_record_of_another_run_or_format_is_refused() -> None:
    record = records.new_run_record(
        "run-1", first=True, boot_version=0, base_digest=None, writer="abc"
    )
    raw = json.loads(records.encode_run_record(record))
    with pytest.raises(CorruptData, match="run 'run-1'"):
        records.parse_run_record(json.dumps(raw).encode(), "run-2")
    with pytest.raises(Unsupported, match="format 2"):
        records.parse_run_record(json.dumps({**raw, "format": {"major": 2}}).encode(), "run-1")
    newer = {**raw, "format": {"major": 1, "minor": 5}, "later": 1}
    assert records.parse_run_record(json.dumps(newer).encode(), "run-1").boot_version == 0
    for key, value in {
        "format": 1,
        "boot_version": "0",
        "updates_dir": "../x",
        "updates_dir ": None,
        "base_digest": "x",
        "run_id": "/",
    }.items():
        damaged = {k: v for k, v in raw.items() if k != key.strip()} | {key.strip(): value}
        with pytest.raises(CorruptData):
            records.parse_run_record(json.dumps(damaged).encode(), "run-1")


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", ".x", "x" * 65, "a\n"])
def test_keys_refuse_bad_run_ids(run_id: str) -> None:
    with pytest.raises(InvalidInput):
        records.run_record_key(run_id)
    with pytest.raises(InvalidInput):
        records.updates_dir_for(run_id, first=False)


def test_published_schemas_are_current() -> None:
    for name, text in document_schemas().items():
        path = SCHEMAS / name
        assert path.read_text() == text, f"{path} is out of date; see stitch.format.schemas"
