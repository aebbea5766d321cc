"""Addresses and the members file: what people write, and what breaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from stitch.env import Env
from stitch.errors import InvalidInput, Unavailable
from stitch.pools import FilePool, Member, StaticPool
from stitch.pools.addresses import members_of, normalize_address
from stitch.pools.local import read_members, write_members


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("replica-1.example", "https://replica-1.example"),
        ("replica-1.example:8443/", "https://replica-1.example:8443"),
        ("http://10.0.0.1:8000///", "http://10.0.0.1:8000"),
        ("https://host/base/", "https://host/base"),
        ("http://[::1]:80/", "http://[::1]:80"),
        ("", None),
        ("   ", None),
        ("https://", None),
        ("http:///path", None),
        ("ftp://host", None),
        ("http://host:port", None),
    ],
)
def test_normalize_address(text: str, wanted: str | None) -> None:
    assert normalize_address(text) == wanted


def test_entries_may_carry_an_id() -> None:
    found = members_of(["b=http://h:2", "a=http://h:1/", "https://", "http://h:3?x=1"])
    assert found == [
        Member("a", "http://h:1"),
        Member("b", "http://h:2"),
        Member("http://h:3", "http://h:3"),
    ]


def test_the_first_of_two_equal_ids_stays() -> None:
    assert members_of(["a=http://h:1", "a=http://h:2"]) == [Member("a", "http://h:1")]


async def test_a_static_pool_without_hosts_is_refused() -> None:
    with pytest.raises(InvalidInput, match="host"):
        StaticPool(["https://", " "], env=Env())


def test_members_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    wanted = [Member("a", "http://h:1"), Member("b", "http://h:2")]
    write_members(Env(), path, wanted[::-1])
    assert read_members(Env(), path) == wanted
    assert [p.name for p in tmp_path.iterdir()] == ["members.json"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"members": []}', '{"format": {"major": 2}, "members": []}',
     '{"format": {"major": 1}, "members": [{"id": "a"}]}', '{"format": {"major": 1}}'],
)  # fmt: skip
def test_a_malformed_members_file_is_unavailable(tmp_path: Path, text: str) -> None:
    path = tmp_path / "members.json"
    path.write_text(text)
    with pytest.raises(Unavailable, match=r"members\.json"):
        read_members(Env(), path)


async def test_watch_gives_up_when_discovery_stays_gone(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    write_members(Env(), path, [])
    pool = FilePool(path, env=Env(), poll_s=0.01, stale_s_max=0.05)
    stream = pool.watch()
    assert list(await anext(stream)) == []
    path.unlink()
    with pytest.raises(Unavailable, match="missing"):
        await anext(stream)
    await pool.close()
