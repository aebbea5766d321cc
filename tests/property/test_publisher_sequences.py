"""Random lives of a publisher: faults, restarts, forks and rollbacks in any order.

After every step: the pointer never goes back within a run, every version that was acknowledged
reads back byte for byte from a cold start, and no sealed byte has changed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stitch.errors import Conflict, Unavailable
from stitch.publisher import Publication, Publisher
from stitch.stores.versions import parse_stored_pointer
from stitch.testing.memory_store import Cells, MemoryStore
from stitch.testing.publisher_suite import WAIT_S, state_of
from stitch.testing.watched_store import WatchedStore, watched
from stitch.types import Ref

NAMES = ("a", "b", "c")
GONE = [Unavailable("gone") for _ in range(20)]


class Life(RuleBasedStateMachine):
    """One store, one trainer, publishers that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = Cells()
        self.tensors: dict[str, np.ndarray[Any, Any]] = {
            name: np.zeros(40 + at, np.float32) for at, name in enumerate(NAMES)
        }
        self.published: dict[Ref, dict[str, bytes]] = {}
        self.sealed_bytes: dict[str, bytes] = {}
        self.last: Ref | None = None
        self.runs = 0
        self.fresh: set[Ref] = set()
        self.faults = False
        self.may_conflict = False
        self.open("run0")

    def open(self, run_id: str, **options: Any) -> None:
        self.watcher: WatchedStore
        self.watcher, store = watched(MemoryStore(self.cells))
        self.publisher = Publisher(
            store, run_id=run_id, threads=1, anchor_every=5, anchor_ratio=100.0, **options
        )

    def snapshot(self) -> dict[str, bytes]:
        return {name: array.tobytes() for name, array in self.tensors.items()}

    def publish(self, **options: Any) -> Publication | None:
        try:
            return self.publisher.publish(self.tensors, **options)
        except Conflict:
            self.fork()
            return None
        except Unavailable:
            return None

    def settle(self, publication: Publication | None, state: dict[str, bytes]) -> None:
        if publication is None:
            return
        try:
            done = publication.wait(WAIT_S)
        except Conflict:
            self.fork()
        except Unavailable:
            return
        else:
            self.published[done.ref] = state
            self.fresh.add(done.ref)
            text = asyncio.run(MemoryStore(self.cells).read_pointer()).text
            ref = parse_stored_pointer(text)
            assert ref is not None, f"{done.ref} was acknowledged and there is no pointer"
            assert ref.version >= done.ref.version, f"{done.ref} was acknowledged, not pointed to"

    def fork(self) -> None:
        """The bytes of an earlier life are in the way: do as the Conflict says."""
        assert self.may_conflict, "a Conflict in a life that no failed one came before"
        self.publisher.close()
        self.runs += 1
        pointer = asyncio.run(MemoryStore(self.cells).read_pointer()).text
        self.open(f"run{self.runs}", **({"fork_from": "pointer"} if pointer else {}))

    @rule(name=st.sampled_from(NAMES), at=st.integers(0, 39))
    def train(self, name: str, at: int) -> None:
        self.tensors[name][at] += 1

    @rule(anchor=st.booleans())
    def publish_one(self, anchor: bool) -> None:
        self.settle(self.publish(anchor=anchor), self.snapshot())

    @rule(name=st.sampled_from(NAMES))
    def publish_two_at_once(self, name: str) -> None:
        self.watcher.gate.clear()
        first, state = self.publish(), self.snapshot()
        self.tensors[name][0] += 1
        second, later = self.publish(), self.snapshot()
        self.watcher.gate.set()
        self.settle(first, state)
        self.settle(second, later)

    @rule(method=st.sampled_from(["put", "seal", "swap_pointer", "begin"]), often=st.booleans())
    def break_next(self, method: str, often: bool) -> None:
        self.watcher.fail_next(method, *(GONE if often else GONE[:1]))
        self.faults = True

    @rule(took_effect=st.booleans(), seal=st.booleans(), twice=st.booleans())
    def lose_a_reply(self, took_effect: bool, seal: bool, twice: bool) -> None:
        replies = self.watcher.lost_seals if seal else self.watcher.lost_replies
        replies.extend([took_effect] * (2 if twice else 1))
        self.faults = True

    @rule()
    def heal(self) -> None:
        self.watcher.failing.clear()
        self.watcher.lost_replies.clear()
        self.watcher.lost_seals.clear()

    @rule()
    def restart(self) -> None:
        self.publisher.close()
        self.may_conflict = self.faults
        self.open(self.publisher.run_id)

    @rule(back=st.integers(0, 3))
    def roll_back(self, back: int) -> None:
        own = [ref for ref in self.published if ref.run_id == self.publisher.run_id]
        if not own:
            return
        origin = sorted(own, key=lambda ref: ref.version)[-1 - back % len(own)]
        try:
            publication = self.publisher.rollback(origin.version)
        except Conflict:
            self.fork()
        except Unavailable:
            return
        else:
            self.settle(publication, self.published[origin])

    @invariant()
    def pointer_only_grows(self) -> None:
        found = asyncio.run(MemoryStore(self.cells).read_pointer())
        ref = parse_stored_pointer(found.text)
        if self.last is not None:
            assert ref is not None
            if ref.run_id == self.last.run_id:
                assert ref.version >= self.last.version, f"{self.last} -> {ref}"
        self.last = ref
        assert not self.watcher.violations, self.watcher.violations

    @invariant()
    def sealed_bytes_stay(self) -> None:
        now = {key: data for key, (data, _) in self.cells.objects.items()}
        for key, data in self.sealed_bytes.items():
            assert now.get(key) == data, f"{key} changed"
        self.sealed_bytes = now

    @invariant()
    def versions_read_back(self) -> None:
        for ref in self.fresh:
            if ref.run_id == "run0":
                assert state_of(MemoryStore(self.cells), ref) == self.published[ref], f"{ref}"
        self.fresh.clear()

    def teardown(self) -> None:
        self.watcher.gate.set()
        self.publisher.close()
        for ref in [ref for ref in self.published if ref.run_id == "run0"][-1:]:
            assert state_of(MemoryStore(self.cells), ref) == self.published[ref]


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
