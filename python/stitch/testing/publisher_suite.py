"""The Publisher conformance suite: named cases over any store.

A case gets `make`, which makes a publisher on a store (`make(store, run_id=…, **options)`), and
`open_client`, which opens one more client of a fresh root. Cases are sync, as trainers are.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from stitch.env import Env
from stitch.errors import Conflict, InvalidInput, StitchError, Unavailable
from stitch.format.publication import PublicationReader
from stitch.format.rebuild import RebuiltTensor, rebuild
from stitch.format.records import version_prefix
from stitch.format.wire import Manifest
from stitch.pools.base import Member
from stitch.publisher import Publication, Publisher
from stitch.stores.base import Store
from stitch.stores.versions import (
    chain_for,
    fetch_version,
    load_run,
    parse_stored_pointer,
    read_manifest,
    record_of,
)
from stitch.testing.store_suite import OpenClient
from stitch.testing.watched_store import WatchedStore, watched
from stitch.types import Kind, Ref

__all__ = ["PUBLISHER_CASES", "MakePublisher", "PublisherCase", "state_of"]

T = TypeVar("T")
Tensors = dict[str, np.ndarray[Any, Any]]
MakePublisher = Callable[..., Publisher]
PublisherCase = Callable[[MakePublisher, OpenClient], None]

WAIT_S: Final = 30.0


def _case(case: PublisherCase) -> PublisherCase:
    """A failure that the case did not expect is a broken promise too."""

    @functools.wraps(case)
    def run(make: MakePublisher, open_client: OpenClient) -> None:
        try:
            case(make, open_client)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"{case.__name__}: {type(error).__name__}: {error}") from error

    return run


def _do(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def model(seed: int = 0) -> Tensors:
    """A small model: two matrices, a vector, bytes, and an empty tensor."""
    rng = np.random.default_rng(seed)
    return {
        "a.weight": rng.standard_normal((6, 32)).astype(np.float32),
        "b.weight": rng.standard_normal((4, 32)).astype(np.float16),
        "c.bias": rng.standard_normal(5).astype(np.float32),
        "d.packed": rng.integers(0, 255, (3, 7), dtype=np.uint8),
        "e.empty": np.empty((0, 4), np.float32),
    }


class WakeCounter:
    """A pool that counts wakes, or fails them."""

    def __init__(self, error: Exception | None = None) -> None:
        self.wakes = 0
        self.error = error

    async def members(self) -> Sequence[Member]:
        return []

    async def wake(self) -> int:
        self.wakes += 1
        if self.error is not None:
            raise self.error
        return 0


class _Nothing:
    tensors: Final[dict[str, Any]] = {}

    def view(self, name: str) -> memoryview:
        raise KeyError(name)


def state_of(store: Store, ref: Ref) -> dict[str, bytes]:
    """All tensors of a version as a cold reader rebuilds them, every digest checked."""

    async def read(cache: Path) -> dict[str, bytes]:
        env = Env()
        record = await record_of(store, ref.run_id)
        chain = await chain_for(store, record, ref.version)
        readers = []
        for number in chain:
            path = await fetch_version(store, record, number, cache, env)
            readers.append(PublicationReader.open(path, expect=Ref(ref.run_id, number)))
        found: dict[str, bytes] = {}

        def keep(tensor: RebuiltTensor) -> None:
            found[tensor.name] = bytes(tensor.data)

        rebuild(_Nothing(), readers, on_tensor=keep, everything=True)
        for reader in readers:
            reader.close()
        return found

    with tempfile.TemporaryDirectory() as cache:
        return _do(read(Path(cache)))


def _check_state(store: Store, ref: Ref, tensors: Tensors) -> None:
    want = {name: array.tobytes() for name, array in tensors.items()}
    found = state_of(store, ref)
    assert found.keys() == want.keys(), f"{ref} has tensors {sorted(found)}"
    wrong = [name for name in want if found[name] != want[name]]
    assert not wrong, f"a cold reader of {ref} gets other bytes for {wrong}"


def _pointer(store: Store) -> Ref | None:
    return parse_stored_pointer(_do(store.read_pointer()).text)


def _manifest(store: Store, ref: Ref) -> Manifest:
    async def read() -> Manifest | None:
        manifest, _ = await read_manifest(store, await record_of(store, ref.run_id), ref.version)
        return manifest

    found = _do(read())
    assert found is not None
    return found


def _bytes_below(store: Store, prefix: str) -> dict[str, bytes | None]:
    async def read() -> dict[str, bytes | None]:
        return {key: await store.read(key, size_max=1 << 30) for key in await store.list(prefix)}

    return _do(read())


def _fails(publish: Callable[[], Publication], error: type[StitchError], promise: str) -> None:
    try:
        publish().wait(WAIT_S)
    except error:
        return
    raise AssertionError(f"{promise}: nothing was raised")


def _watched(open_client: OpenClient) -> tuple[WatchedStore, Store]:
    return watched(open_client())


@_case
def versions_read_back_byte_for_byte(make: MakePublisher, open_client: OpenClient) -> None:
    """Anchor, deltas and an anchor in between: each version is what was given."""
    store, tensors = open_client(), model()
    with make(store, run_id="a") as publisher:
        given = []
        for number in range(1, 5):
            tensors["a.weight"][number, number] += 1
            if number == 3:
                tensors["b.weight"] = (tensors["b.weight"] * 2).astype(np.float16)
            published = publisher.publish(tensors, anchor=number == 3).wait(WAIT_S)
            assert published.ref == Ref("a", number)
            given.append({name: array.copy() for name, array in tensors.items()})
    for number, state in enumerate(given, 1):
        _check_state(store, Ref("a", number), state)
    kinds = [_manifest(store, Ref("a", number)).kind for number in range(1, 5)]
    assert kinds == ["anchor", "delta", "anchor", "delta"], f"the kinds are {kinds}"


@_case
def pointer_names_only_complete_versions(make: MakePublisher, open_client: OpenClient) -> None:
    """At each pointer move the version is sealed and every file is there (durable first)."""
    watcher, store = _watched(open_client)
    tensors = model()
    with make(store, run_id="a") as publisher:
        for _ in range(3):
            tensors["c.bias"] += 1
            publisher.publish(tensors).wait(WAIT_S)
    assert not watcher.violations, watcher.violations[0]
    assert _pointer(store) == Ref("a", 3)


@_case
def inputs_are_not_read_after_publish(make: MakePublisher, open_client: OpenClient) -> None:
    """Tensors overwritten right after `publish` returns change nothing, for anchor and delta."""
    watcher, store = _watched(open_client)
    with make(store, run_id="a") as publisher:
        for number, tensors in enumerate((model(1), model(2)), 1):
            want = {name: array.copy() for name, array in tensors.items()}
            watcher.gate.clear()
            publication = publisher.publish(tensors)
            for array in tensors.values():
                array.view(np.uint8)[...] = 0xAB
            watcher.gate.set()
            publication.wait(WAIT_S)
            _check_state(store, Ref("a", number), want)


@_case
def baseline_follows_sealed_versions(make: MakePublisher, open_client: OpenClient) -> None:
    """After a failed publication the next one still gives a cold reader the right bytes."""
    watcher, store = _watched(open_client)
    tensors = model()
    with make(store, run_id="a") as publisher:
        publisher.publish(tensors).wait(WAIT_S)
        tensors["a.weight"][0, 0] += 1
        watcher.fail_next("put", Unavailable("the upload broke"))
        _fails(lambda: publisher.publish(tensors), Unavailable, "a failed upload is raised")
        tensors["c.bias"][0] += 1
        published = publisher.publish(tensors).wait(WAIT_S)
        _check_state(store, published.ref, tensors)


@_case
def failure_reaches_queued_publications_intact(
    make: MakePublisher, open_client: OpenClient
) -> None:
    """One that was encoded on a failed one carries that one's changes too."""
    watcher, store = _watched(open_client)
    tensors = model()
    with make(store, run_id="a", in_flight_max=3) as publisher:
        publisher.publish(tensors).wait(WAIT_S)
        watcher.gate.clear()
        watcher.fail_next("put", Unavailable("the upload broke"))
        tensors["a.weight"][0, 0] += 1
        first = publisher.publish(tensors)
        tensors["c.bias"][0] += 1
        second = publisher.publish(tensors)
        watcher.gate.set()
        _fails(lambda: first, Unavailable, "a failed upload is raised")
        _check_state(store, second.wait(WAIT_S).ref, tensors)


@_case
def failed_publication_moves_nothing(make: MakePublisher, open_client: OpenClient) -> None:
    """An upload that fails is raised; pointer and listing stay as they were."""
    watcher, store = _watched(open_client)
    with make(store, run_id="a") as publisher:
        publisher.publish(model()).wait(WAIT_S)
        before = _bytes_below(store, "updates")
        for method in ("put", "seal"):
            watcher.fail_next(method, *(Unavailable("the store is full") for _ in range(2)))
            _fails(lambda: publisher.publish(model(1)), Unavailable, f"a failed {method} is raised")
            watcher.failing.clear()
            assert _pointer(store) == Ref("a", 1), f"a failed {method} moved the pointer"
            assert _bytes_below(store, "updates") == before, f"a failed {method} left files"


@_case
def conflict_is_raised_and_nobody_woken(make: MakePublisher, open_client: OpenClient) -> None:
    """If another writer moved the pointer, its value stays and the loser hears of it."""
    store, pool = open_client(), WakeCounter()
    with make(store, run_id="a", pool=pool) as publisher:
        publisher.publish(model()).wait(WAIT_S)
        found = _do(store.read_pointer())
        _do(store.swap_pointer(found.token, "b/weight_v000000"))
        _fails(lambda: publisher.publish(model(1)), Conflict, "a pointer of another writer")
        _fails(lambda: publisher.publish(model(2)), Conflict, "a fenced publisher stays fenced")
        assert _pointer(store) == Ref("b", 0), "the other writer's pointer was replaced"
    assert pool.wakes <= 1, "replicas were woken for a publication that failed"


@_case
def pointer_moved_during_the_seal_is_a_conflict(
    make: MakePublisher, open_client: OpenClient
) -> None:
    """The swap compares with what this publisher last wrote, not with what it reads just then."""
    watcher, store = _watched(open_client)
    with make(store, run_id="a") as publisher:
        publisher.publish(model()).wait(WAIT_S)
        watcher.gate.clear()
        publication = publisher.publish(model(1))
        found = _do(store.read_pointer())
        _do(watcher.inner.swap_pointer(found.token, "b/weight_v000000"))
        watcher.gate.set()
        _fails(lambda: publication, Conflict, "a pointer moved between plan and swap")
        assert _pointer(store) == Ref("b", 0), "the other writer's pointer was replaced"


@_case
def anchor_holds_every_tensor(make: MakePublisher, open_client: OpenClient) -> None:
    """An anchor made while only one tensor is given still has all of them."""
    store, tensors = open_client(), model()
    with make(store, run_id="a") as publisher:
        publisher.publish(tensors).wait(WAIT_S)
        tensors["c.bias"] += 1
        published = publisher.publish({"c.bias": tensors["c.bias"]}, anchor=True).wait(WAIT_S)
    assert published.kind is Kind.ANCHOR
    _check_state(store, Ref("a", 2), tensors)


@_case
def empty_delta_is_a_version(make: MakePublisher, open_client: OpenClient) -> None:
    """Unchanged tensors make a version of their own, sealed and pointed to."""
    store, tensors = open_client(), model()
    with make(store, run_id="a") as publisher:
        publisher.publish(tensors).wait(WAIT_S)
        published = publisher.publish(tensors).wait(WAIT_S)
    assert (published.ref, published.changed) == (Ref("a", 2), 0), f"got {published}"
    assert _pointer(store) == Ref("a", 2), "an empty delta did not move the pointer"
    _check_state(store, Ref("a", 2), tensors)


@_case
def failed_wake_is_no_failure(make: MakePublisher, open_client: OpenClient) -> None:
    """Replicas poll anyway: an error of the pool is not one of the publication."""
    store, pool = open_client(), WakeCounter(RuntimeError("nobody there"))
    with make(store, run_id="a", pool=pool) as publisher:
        publisher.publish(model()).wait(WAIT_S)
        publisher.publish(model(1)).wait(WAIT_S)
    assert pool.wakes >= 1, "the pool was never woken"
    assert _pointer(store) == Ref("a", 2)


@_case
def equal_retry_succeeds_without_rewriting(make: MakePublisher, open_client: OpenClient) -> None:
    """The same version again: equal bytes succeed, others conflict, and no sealed byte changes."""
    store = open_client()
    with make(store, run_id="a") as publisher:
        publisher.publish(model()).wait(WAIT_S)
        publisher.publish(model(1)).wait(WAIT_S)
        before = _bytes_below(store, "updates")
        again = publisher.publish(model(1), version=2).wait(WAIT_S)
        assert not again.created, "an equal retry claims to have written"
        assert not publisher.publish(model(), version=1).wait(WAIT_S).created
        _fails(lambda: publisher.publish(model(2), version=2), Conflict, "other bytes for v2")
        _fails(lambda: publisher.publish(model(2), version=1), Conflict, "other bytes for v1")
        _fails(lambda: publisher.publish(model(2), version=0), InvalidInput, "the boot version")
        assert _bytes_below(store, "updates") == before, "a retry changed sealed bytes"
        publisher.publish(model(2)).wait(WAIT_S)
        _check_state(store, Ref("a", 3), model(2))


@_case
def restart_goes_on_above_the_pointer(make: MakePublisher, open_client: OpenClient) -> None:
    """A new publisher of the run takes the next number and the right base."""
    tensors = model()
    with make(open_client(), run_id="a") as publisher:
        publisher.publish(tensors).wait(WAIT_S)
        tensors["c.bias"] += 1
        publisher.publish(tensors).wait(WAIT_S)
    store = open_client()
    with make(store, run_id="a") as publisher:
        assert publisher.claim() == Ref("a", 2), f"the restart stands at {publisher.ref}"
        tensors["a.weight"][0] += 1
        published = publisher.publish(tensors).wait(WAIT_S)
    assert published.ref == Ref("a", 3), f"the restart published {published.ref}"
    assert published.kind is Kind.DELTA, "the restart forgot what is sealed"
    _check_state(store, Ref("a", 3), tensors)


@_case
def unknown_swap_is_read_back(make: MakePublisher, open_client: OpenClient) -> None:
    """A lost reply, whether the swap took effect or not, ends with the pointer moved."""
    watcher, store = _watched(open_client)
    with make(store, run_id="a") as publisher:
        publisher.publish(model()).wait(WAIT_S)
        for number, took_effect in ((2, True), (3, False)):
            watcher.lost_replies.append(took_effect)
            publisher.publish(model(number)).wait(WAIT_S)
            assert _pointer(store) == Ref("a", number), f"the pointer is at {_pointer(store)}"


@_case
def second_publisher_loses(make: MakePublisher, open_client: OpenClient) -> None:
    """Two publishers of one run: the slower one gets a Conflict, the sealed bytes stay."""
    store = open_client()
    with make(store, run_id="a") as one, make(open_client(), run_id="a") as two:
        one.publish(model()).wait(WAIT_S)
        two.claim()
        one.publish(model(1)).wait(WAIT_S)
        before = _bytes_below(store, "updates")
        _fails(lambda: two.publish(model(2)), Conflict, "the second publisher must lose")
        assert _bytes_below(store, "updates") == before, "the loser changed sealed bytes"
        one.publish(model(3)).wait(WAIT_S)
        _check_state(store, Ref("a", 3), model(3))


@_case
def sealed_above_the_pointer_is_not_adopted(make: MakePublisher, open_client: OpenClient) -> None:
    """A version sealed by a writer that died before the pointer: equal bytes go on, others not."""
    watcher, store = _watched(open_client)
    with make(store, run_id="a") as publisher:
        publisher.publish(model()).wait(WAIT_S)
        watcher.fail_next("swap_pointer", *(Unavailable("gone") for _ in range(20)))
        _fails(lambda: publisher.publish(model(1)), Unavailable, "a pointer that cannot move")
    watcher.failing.clear()
    with make(open_client(), run_id="a") as other:
        _fails(lambda: other.publish(model(2)), Conflict, "other bytes above the pointer")
        assert _pointer(store) == Ref("a", 1)
    with make(open_client(), run_id="a") as equal:
        published = equal.publish(model(1)).wait(WAIT_S)
        assert not published.created, "an equal version was written again"
    assert _pointer(store) == Ref("a", 2)


@_case
def concurrent_publishes_are_serialised(make: MakePublisher, open_client: OpenClient) -> None:
    """Threads that publish at once get versions in order, each whole."""
    store = open_client()
    done: dict[int, Ref] = {}
    with make(store, run_id="a") as publisher:
        publisher.publish(model()).wait(WAIT_S)

        def publish(seed: int) -> None:
            done[seed] = publisher.publish(model(seed)).wait(WAIT_S).ref

        threads = [threading.Thread(target=publish, args=(seed,)) for seed in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(ref.version for ref in done.values()) == list(range(2, 8)), f"got {done}"
    for seed, ref in done.items():
        _check_state(store, ref, model(seed))


@_case
def every_changed_byte_ships(make: MakePublisher, open_client: OpenClient) -> None:
    """Sign of zero, NaN payloads, single bytes: compared as bytes, never as numbers."""
    store, tensors = open_client(), model()
    tensors["c.bias"][:] = [0.0, np.nan, 1.0, 2.0, 3.0]
    with make(store, run_id="a") as publisher:
        publisher.publish(tensors).wait(WAIT_S)
        raw = tensors["c.bias"].view(np.uint32)
        raw[0] = 0x80000000
        publisher.publish(tensors).wait(WAIT_S)
        _check_state(store, Ref("a", 2), tensors)
        raw[1] = 0x7FC00123
        publisher.publish(tensors).wait(WAIT_S)
        _check_state(store, Ref("a", 3), tensors)
        tensors["d.packed"][0, 0] ^= 0x80
        publisher.publish(tensors).wait(WAIT_S)
        _check_state(store, Ref("a", 4), tensors)


@_case
def rollback_is_a_new_version(make: MakePublisher, open_client: OpenClient) -> None:
    """Older bytes under a higher number; the pointer only grows."""
    store = open_client()
    with make(store, run_id="a") as publisher:
        for seed in range(1, 4):
            publisher.publish(model(seed)).wait(WAIT_S)
        published = publisher.rollback(1).wait(WAIT_S)
        assert published.ref == Ref("a", 4), f"the rollback is {published.ref}"
        assert _pointer(store) == Ref("a", 4), f"the pointer is at {_pointer(store)}"
        _check_state(store, Ref("a", 4), model(1))
        rolled_back = _manifest(store, Ref("a", 4)).rollback_of
        assert rolled_back is not None, "the manifest does not say that it is a rollback"
        assert rolled_back.to_ref() == Ref("a", 1), f"it says a rollback of {rolled_back}"
        publisher.publish(model(5)).wait(WAIT_S)
        _check_state(store, Ref("a", 5), model(5))


@_case
def fork_starts_a_run_from_the_pointer(make: MakePublisher, open_client: OpenClient) -> None:
    """The fork's record names its origin; its first delta applies to that state."""
    store = open_client()
    with make(store, run_id="a") as publisher:
        publisher.publish(model()).wait(WAIT_S)
        published = publisher.publish(model(1)).wait(WAIT_S)
    with make(store, run_id="b", fork_from="pointer") as forked:
        assert forked.claim() == Ref("b", 2)
        record = _do(load_run(store, "b"))
        assert record is not None, "the fork has no record"
        assert record.forked_from is not None, "the fork has no origin"
        point = record.forked_from
        assert (point.run_id, point.version) == ("a", 2), f"the origin is {point}"
        assert point.manifest_digest == published.manifest_digest
        assert record.base_digest == published.target_digest
        forked.publish(model(2), anchor=True).wait(WAIT_S)
        _check_state(store, Ref("b", 3), model(2))
    prefix = version_prefix(record, 3)
    assert prefix.startswith("runs/b/updates/"), f"the fork writes to {prefix}"


@_case
def only_an_anchor_changes_the_model(make: MakePublisher, open_client: OpenClient) -> None:
    """Another name, dtype or shape is refused, and fine with rebase."""
    store, tensors = open_client(), model()
    with make(store, run_id="a") as publisher:
        publisher.publish(tensors).wait(WAIT_S)
        for change in (
            {"new.weight": np.zeros(3, np.float32)},
            {"c.bias": np.zeros(6, np.float32)},
            {"c.bias": np.zeros(5, np.int32)},
        ):
            changed = {**tensors, **change}
            _fails(
                lambda changed=changed: publisher.publish(changed),  # type: ignore[misc]
                InvalidInput,
                "another model needs rebase",
            )
        grown = {**tensors, "new.weight": np.ones(3, np.float32)}
        del grown["b.weight"]
        published = publisher.publish(grown, rebase=True).wait(WAIT_S)
        assert published.kind is Kind.ANCHOR
        _check_state(store, published.ref, grown)
        grown["new.weight"][0] = 5
        _check_state(store, publisher.publish(grown).wait(WAIT_S).ref, grown)


PUBLISHER_CASES: Final[tuple[PublisherCase, ...]] = (
    versions_read_back_byte_for_byte,
    pointer_names_only_complete_versions,
    inputs_are_not_read_after_publish,
    baseline_follows_sealed_versions,
    failure_reaches_queued_publications_intact,
    failed_publication_moves_nothing,
    conflict_is_raised_and_nobody_woken,
    pointer_moved_during_the_seal_is_a_conflict,
    anchor_holds_every_tensor,
    empty_delta_is_a_version,
    failed_wake_is_no_failure,
    equal_retry_succeeds_without_rewriting,
    restart_goes_on_above_the_pointer,
    unknown_swap_is_read_back,
    second_publisher_loses,
    sealed_above_the_pointer_is_not_adopted,
    concurrent_publishes_are_serialised,
    every_changed_byte_ships,
    rollback_is_a_new_version,
    fork_starts_a_run_from_the_pointer,
    only_an_anchor_changes_the_model,
)
