"""Keys and names of a store: relative POSIX paths that cannot leave the root."""

from __future__ import annotations

import re
from typing import Final

from stitch.errors import InvalidInput

__all__ = ["RESERVED_PREFIX", "check_attempt", "check_key", "check_lease_name", "check_name"]

# Names that begin so are never visible: unfinished writes.
RESERVED_PREFIX: Final = ".tmp-"

_KEY_BYTES_MAX: Final = 1024
_NAME_BYTES_MAX: Final = 255
_ATTEMPT = re.compile(r"[A-Za-z0-9]{1,64}")
_LEASE_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_key(key: str, *, empty_allowed: bool = False) -> str:
    """Return `key` if it is a relative path of plain segments.

    Raises: InvalidInput for an absolute path, `.` or `..`, an empty segment, a backslash or
        control character, a reserved name, or one too long for a file system.
    """
    if key == "" and empty_allowed:
        return key
    if len(key.encode("utf-8", "surrogatepass")) > _KEY_BYTES_MAX:
        raise InvalidInput(f"key {key[:60]!r}… is longer than {_KEY_BYTES_MAX} bytes", param="key")
    for segment in key.split("/"):
        _check_segment(segment, key)
    return key


def check_name(name: str) -> str:
    """Return `name` if it is one plain segment: the bare name of a file. Raises: InvalidInput."""
    if "/" in name:
        raise InvalidInput(f"file name {name!r} must be bare, without a folder", param="name")
    _check_segment(name, name)
    return name


def check_attempt(attempt: str) -> str:
    """Return `attempt` if it is a nonce of letters and digits. Raises: InvalidInput."""
    if not _ATTEMPT.fullmatch(attempt):
        raise InvalidInput(
            f"attempt {attempt!r} must be 1 to 64 letters and digits", param="attempt"
        )
    return attempt


def check_lease_name(name: str) -> str:
    """Return `name` if it can name a lease. Raises: InvalidInput."""
    if not _LEASE_NAME.fullmatch(name) or name.startswith("."):
        raise InvalidInput(
            f"lease name {name!r} must be 1 to 128 of [A-Za-z0-9._-], not starting with a dot",
            param="name",
        )
    return name


def _check_segment(segment: str, key: str) -> None:
    if segment in {"", ".", ".."}:
        raise InvalidInput(f"key {key!r} must be a relative path without '.' or '..'", param="key")
    if segment.startswith(RESERVED_PREFIX):
        raise InvalidInput(
            f"key {key!r}: names starting {RESERVED_PREFIX!r} are reserved", param="key"
        )
    if "\\" in segment or any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in segment):
        raise InvalidInput(f"key {key!r} holds a character that no key may have", param="key")
    if len(segment.encode("utf-8")) > _NAME_BYTES_MAX:
        raise InvalidInput(f"key {key[:60]!r}… has too long a name", param="key")
