"""JSON from a store: bounded, without duplicate keys, without numbers that JSON does not have."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from stitch.errors import CorruptData

__all__ = ["parse_object"]


Buffer = bytes | bytearray | memoryview


def parse_object(data: Buffer, *, where: str, size_max: int) -> dict[str, Any]:
    """Decode one JSON object.

    Raises: CorruptData (field `file=where`) for more than `size_max` bytes, bytes that are not
        UTF-8, bad JSON, anything but an object, a duplicate key at any depth, NaN or Infinity,
        lone surrogates, or nesting too deep.
    """

    def fail(reason: str, cause: BaseException | None = None) -> NoReturn:
        raise CorruptData(f"{where}: {reason}", file=where, reason=reason) from cause

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    fail(f"duplicate name {key[:200]!r} in a JSON object")
                seen.add(key)
        return found

    def constant(text: str) -> NoReturn:
        fail(f"{text} is not JSON")

    if len(data) > size_max:
        fail(f"{len(data)} bytes of JSON; at most {size_max} are read")
    try:
        text = str(data, "utf-8")
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        fail("JSON nested too deep", error)
    except UnicodeError as error:
        fail("not valid Unicode", error)
    except ValueError as error:
        fail(f"not JSON: {str(error)[:120]}", error)
    if not isinstance(value, dict):
        fail(f"a JSON object is needed, found {type(value).__name__}")
    return value
