"""Request fields that several routes read: flags, ids, one value or one per prompt."""

from __future__ import annotations

from typing import Any

from stitch.engines.embedded.service import Service
from stitch.errors import InvalidInput

__all__ = ["read_each", "read_flag", "read_rids"]


def read_flag(body: dict[str, Any], name: str) -> bool:
    """A boolean; null and absent are false. Raises: InvalidInput."""
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} must be true or false", param=name)
    return value


def read_each(body: dict[str, Any], name: str, count: int, kind: type, default: Any) -> list[Any]:
    """One value per prompt, from one value or a list. Raises: InvalidInput."""
    value = body.get(name)
    items = value if isinstance(value, list) else [value] * count
    if len(items) != count:
        raise InvalidInput(f"{name} has {len(items)} items for {count} prompts", param=name)
    found = []
    for item in items:
        if item is None:
            found.append(default)
        elif isinstance(item, kind) and not (kind is int and isinstance(item, bool)):
            found.append(item)
        else:
            raise InvalidInput(f"{name} must be {kind.__name__}, or a list of it", param=name)
    return found


def read_rids(service: Service, raw: Any, count: int) -> list[tuple[str, str]]:
    """(group, rid) per prompt; one rid for a batch names all of it. Raises: InvalidInput."""
    if isinstance(raw, list):
        if len(raw) != count or len(set(map(str, raw))) != count:
            raise InvalidInput(f"rid must hold {count} different ids", param="rid")
        rids = [service.rid(one) for one in raw]
        return list(zip(rids, rids, strict=True))
    group = service.rid(raw)
    if count == 1:
        return [(group, group)]
    return [(group, f"{group}-{i}") for i in range(count)]
