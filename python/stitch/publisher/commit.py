"""The manifest and index of one version, and whether a version that is there already is equal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stitch.checksum import blake3
from stitch.errors import Conflict, InvalidInput, NotVisibleYet
from stitch.format.manifest import MANIFEST_SIZE_MAX
from stitch.format.records import version_prefix
from stitch.format.shards import INDEX_SIZE_MAX
from stitch.format.wire import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    FileEntry,
    FormatVersion,
    Manifest,
    RefModel,
    TensorEntry,
    to_json_bytes,
)
from stitch.format.write import encode_index, manifest_name
from stitch.publisher.plan import Offer, Plan
from stitch.publisher.session import Session, fenced
from stitch.publisher.state import SealedState, TensorFacts
from stitch.stores.versions import read_manifest
from stitch.types import Kind, Ref

__all__ = ["Documents", "equal_manifest", "make_documents", "make_facts", "retry_plan"]


@dataclass(frozen=True, slots=True)
class Documents:
    """The two documents of a version, ready to write."""

    manifest_name: str
    manifest: bytes
    manifest_digest: str
    index: bytes


def make_documents(
    ref: Ref,
    plan: Plan,
    *,
    sealed: SealedState,
    tensors: Mapping[str, TensorFacts],
    entries: Sequence[FileEntry],
    weight_map: Mapping[str, str],
    encoding: str,
    checksum_format: str,
    rollback_of: Ref | None,
) -> Documents:
    """Manifest and index of `ref`. `tensors`: what a delta changes, or all of an anchor's."""
    delta = plan.kind is Kind.DELTA
    manifest = Manifest(
        format=FormatVersion(major=FORMAT_MAJOR, minor=FORMAT_MINOR),
        ref=RefModel.of(ref),
        kind="delta" if delta else "anchor",
        attempt=plan.attempt,
        base=RefModel.of(sealed.ref) if delta else None,
        base_digest=sealed.model_digest if delta else None,
        target_digest=plan.target_digest,
        parent=sealed.manifest_digest,
        rollback_of=RefModel.of(rollback_of) if rollback_of is not None else None,
        encoding=encoding if delta else None,  # type: ignore[arg-type]
        checksum_format=checksum_format if delta else None,  # type: ignore[arg-type]
        files=list(entries),
        tensors={
            name: TensorEntry(
                dtype=facts.dtype, shape=list(facts.shape), checksum=facts.checksum.to_text()
            )
            for name, facts in sorted(tensors.items())
        },
    )
    data = to_json_bytes(manifest)
    digest = blake3(data)
    name = manifest_name(plan.attempt)
    index = encode_index(
        ref=ref,
        kind=plan.kind,
        base_version=sealed.ref.version if delta else None,
        encoding=encoding if delta else None,
        checksum_format=checksum_format if delta else None,
        weight_map=weight_map,
        total_size=None if delta else sum(facts.nbytes for facts in tensors.values()),
        manifest_name=name,
        manifest_blake3=digest,
    )
    for what, size, size_max in (
        ("manifest", len(data), MANIFEST_SIZE_MAX),
        ("index", len(index), INDEX_SIZE_MAX),
    ):
        if size > size_max:
            raise InvalidInput(
                f"the {what} of {ref} has {size} bytes and readers take {size_max}: publish fewer "
                "tensors, or under shorter names"
            )
    return Documents(name, data, digest, index)


def make_facts(
    ref: Ref, plan: Plan, offers: Sequence[Offer], seconds: Mapping[str, float]
) -> bytes:
    """What it took to make this version, as JSON: seconds, and for each changed tensor its size and
    its payload's in a delta. Outside the signed bytes; nobody reads it to rebuild anything."""
    sizes = {
        name: [tensor.facts.nbytes, tensor.blob_bytes]
        for offer in offers
        for name, tensor in offer.tensors.items()
        if tensor.changed
    }
    facts = {
        "ref": ref.to_wire(),
        "kind": plan.kind.value,
        "ranks": len(offers),
        "seconds": {name: round(value, 6) for name, value in seconds.items()},
        "tensors": dict(sorted(sizes.items())),
    }
    return json.dumps(facts).encode()


async def equal_manifest(
    session: Session, ref: Ref, *, target_digest: str, changed: Mapping[str, TensorFacts]
) -> tuple[Manifest, str] | None:
    """The manifest, and its digest, of a sealed version equal to ours; None if none is sealed.

    Equal means equal base and equal tensor targets, never equal file bytes.
    Raises: Conflict (fencing) if the name is sealed with anything else.
    """
    try:
        manifest, digest = await read_manifest(session.store, session.record, ref.version)
    except NotVisibleYet:
        return None
    if manifest is not None and _is_equal(session.sealed, manifest, target_digest, changed):
        await session.store.confirm(version_prefix(session.record, ref.version))
        return manifest, digest
    session.fence = fenced(f"{ref} is sealed already, by another writer, with other bytes")
    raise session.fence


async def retry_plan(session: Session, ref: Ref, *, target_digest: str) -> Plan:
    """The plan for a version that is not above the sealed state: equal bytes are a success.

    Raises: Conflict for other bytes, or for a version that was never published.
    """
    try:
        manifest, digest = await read_manifest(session.store, session.record, ref.version)
    except NotVisibleYet:
        raise Conflict(
            f"{ref} was never published, and {session.sealed.ref} is sealed above it", ref=str(ref)
        ) from None
    if manifest is None or manifest.target_digest != target_digest:
        raise Conflict(
            f"{ref} is published already, with other bytes; publish under a higher version",
            ref=str(ref),
        )
    return Plan(Kind(manifest.kind), manifest.attempt, (), target_digest, digest, retry=True)


def _is_equal(
    sealed: SealedState,
    manifest: Manifest,
    target_digest: str,
    changed: Mapping[str, TensorFacts],
) -> bool:
    if manifest.target_digest != target_digest:
        return False
    if manifest.kind == "delta" and manifest.base_digest != sealed.model_digest:
        return False
    for name, facts in changed.items():
        entry = manifest.tensors.get(name)
        if entry is None or entry.checksum != facts.checksum.to_text():
            return False
    return True
