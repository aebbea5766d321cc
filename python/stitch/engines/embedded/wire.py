"""The rank channel's JSON: orders and replies between adapter and engine process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast, get_args, get_type_hints

from stitch.engines.base import RANK_PROTOCOL, RankOrder, RankReply, TensorSlice
from stitch.errors import InvalidInput
from stitch.types import Label, Ref

__all__ = [
    "label_from_wire",
    "label_to_wire",
    "order_from_wire",
    "order_to_wire",
    "replies_from_wire",
    "replies_to_wire",
]

ORDER_OPS: Final[tuple[str, ...]] = get_args(get_type_hints(RankOrder)["op"])
_SLICE_FIELDS: Final = {
    "name": str,
    "path": str,
    "offset": int,
    "nbytes": int,
    "dtype": str,
    "checksum": str,
}


def label_to_wire(label: Label | None) -> dict[str, Any] | None:
    """A label as JSON; None stays None (unknown)."""
    return None if label is None else label.to_wire()


def label_from_wire(raw: Any) -> Label | None:
    """Parse `label_to_wire`'s form. Raises: InvalidInput."""
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise InvalidInput("label must be an object or null", param="label")
    epoch: Any = raw.get("epoch")
    if not _is(epoch, int) or epoch < 0:
        raise InvalidInput("label.epoch must be a non-negative integer", param="label.epoch")
    run_id: Any = raw.get("run_id")
    version: Any = raw.get("version")
    if not _is(run_id, str) or not _is(version, int):
        raise InvalidInput("label needs run_id (text) and version (integer)", param="label")
    return Label(Ref(run_id, version), epoch)


def order_to_wire(order: RankOrder) -> dict[str, Any]:
    """One order as JSON."""
    return {
        "protocol": RANK_PROTOCOL,
        "incarnation": order.incarnation,
        "attempt": order.attempt,
        "op": order.op,
        "tensors": [_slice_to_wire(t) for t in order.tensors],
        "undo_tensors": [_slice_to_wire(t) for t in order.undo_tensors],
        "scope": order.scope,
        "label": label_to_wire(order.label),
        "via": order.via,
    }


def order_from_wire(raw: Any) -> RankOrder:
    """Parse one order. Raises: InvalidInput naming the field."""
    if not isinstance(raw, dict):
        raise InvalidInput("a rank order must be a JSON object")
    if raw.get("protocol") != RANK_PROTOCOL:
        raise InvalidInput(
            f"rank protocol {raw.get('protocol')!r} is not {RANK_PROTOCOL}; "
            "run sidecar and engine from the same release",
            param="protocol",
        )
    incarnation: Any = raw.get("incarnation")
    attempt: Any = raw.get("attempt")
    if not _is(incarnation, str) or not incarnation:
        raise InvalidInput("incarnation must be non-empty text", param="incarnation")
    if not _is(attempt, int) or attempt < 0:
        raise InvalidInput("attempt must be a non-negative integer", param="attempt")
    for name, allowed, default in (
        ("op", ORDER_OPS, None),
        ("scope", ("changed", "full"), "changed"),
        ("via", ("disk", "cpu"), "cpu"),
    ):
        if raw.get(name, default) not in allowed:
            raise InvalidInput(f"{name} must be one of {', '.join(allowed)}", param=name)
    return RankOrder(
        incarnation=incarnation,
        attempt=attempt,
        op=raw["op"],
        tensors=_slices_from_wire(raw.get("tensors", []), "tensors"),
        undo_tensors=_slices_from_wire(raw.get("undo_tensors", []), "undo_tensors"),
        scope=raw.get("scope", "changed"),
        label=label_from_wire(raw.get("label")),
        via=raw.get("via", "cpu"),
    )


def replies_to_wire(replies: Sequence[RankReply]) -> dict[str, Any]:
    """All ranks' answers as JSON."""
    return {
        "protocol": RANK_PROTOCOL,
        "replies": [
            {"rank": r.rank, "code": r.code, "message": r.message, "data": dict(r.data)}
            for r in replies
        ],
    }


def replies_from_wire(raw: Any) -> tuple[RankReply, ...]:
    """Parse the ranks' answers. Raises: InvalidInput if they are not that."""
    try:
        return tuple(
            RankReply(int(r["rank"]), str(r["code"]), str(r["message"]), dict(r["data"]))
            for r in raw["replies"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput("the engine's answer is not a list of rank replies") from error


def _slice_to_wire(tensor: TensorSlice) -> dict[str, Any]:
    fields = {name: getattr(tensor, name) for name in _SLICE_FIELDS}
    return {**fields, "shape": list(tensor.shape)}


def _slices_from_wire(raw: Any, where: str) -> tuple[TensorSlice, ...]:
    if not isinstance(raw, list):
        raise InvalidInput(f"{where} must be a list", param=where)
    return tuple(_slice_from_wire(item, f"{where}[{i}]") for i, item in enumerate(raw))


def _slice_from_wire(raw: Mapping[str, Any], where: str) -> TensorSlice:
    if not isinstance(raw, dict):
        raise InvalidInput(f"{where} must be an object", param=where)
    for name, kind in _SLICE_FIELDS.items():
        if not _is(raw.get(name), kind):
            raise InvalidInput(f"{where}.{name} must be {kind.__name__}", param=f"{where}.{name}")
    shape = raw.get("shape")
    if not isinstance(shape, list) or not all(_is(n, int) and n >= 0 for n in shape):
        raise InvalidInput(f"{where}.shape must be a list of sizes", param=f"{where}.shape")
    if raw["offset"] < 0 or raw["nbytes"] < 0:
        raise InvalidInput(f"{where} has a negative offset or size", param=where)
    fields = cast(dict[str, Any], {name: raw[name] for name in _SLICE_FIELDS})
    return TensorSlice(**fields, shape=tuple(shape))


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
