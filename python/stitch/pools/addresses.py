"""Replica addresses as people and discovery services write them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from stitch.pools.base import Member

__all__ = ["members_of", "normalize_address"]


def normalize_address(text: str) -> str | None:
    """A base URL without trailing slashes; `https://` if no scheme is given; None without a host.

    Plain `http` is kept only where it is written out: a bare name must not lose encryption.
    """
    stripped = text.strip()
    if not stripped:
        return None
    full = stripped if "://" in stripped else f"https://{stripped}"
    try:
        parts = urlsplit(full)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return None
    if not host or parts.scheme not in {"http", "https"}:
        return None
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")


def members_of(entries: Iterable[str]) -> list[Member]:
    """Members from `URL` or `ID=URL` entries, sorted by id, duplicates and hostless ones dropped.

    Without an id the URL is the id, so it is stable while the address lives.
    """
    found: dict[str, Member] = {}
    for entry in entries:
        name, equals, address = entry.partition("=")
        if not equals or "/" in name or ":" in name:
            name, address = "", entry
        url = normalize_address(address)
        if url is not None:
            member = Member(name.strip() or url, url)
            found.setdefault(member.id, member)
    return [found[key] for key in sorted(found)]
