"""The publisher's view of its run: claim, sealed state, and the pointer it may move.

One session belongs to one pipeline task. A session is fenced once another writer is seen: all
later publications fail with the same Conflict, and the way on is a fork.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stitch.errors import Conflict, StitchError, Unavailable
from stitch.format.wire import RunRecord
from stitch.publisher.state import SealedState
from stitch.stores.base import Lost, PointerRead, Store, SwapResult, Unknown, Won
from stitch.stores.versions import parse_stored_pointer
from stitch.types import Ref, decide_pointer_move

__all__ = ["Session", "fenced"]

_SWAP_TRIES = 8


def fenced(message: str, **fields: object) -> Conflict:
    """A Conflict after which this publisher writes no more."""
    return Conflict(
        f"{message}; to go on, fork the run from the pointer under a new run id",
        fenced=True,
        **fields,
    )


@dataclass
class Session:
    """Mutable state of one claimed run. Only the pipeline task writes it.

    token, pointer: of the last pointer this publisher wrote or read. ours: texts that a swap of
    unknown outcome may have left in the pointer. names_wanted: while the state is lost, the names
    that the next anchor must have.
    """

    store: Store
    record: RunRecord
    sealed: SealedState
    pointer: Ref
    token: str | None
    ours: set[str] = field(default_factory=set)
    fence: StitchError | None = None
    names_wanted: frozenset[str] | None = None

    @property
    def run_id(self) -> str:
        """The run this publisher writes."""
        return self.record.run_id

    async def check_pointer(self) -> None:
        """Notice another writer before anything is written. An old value is no proof: some stores
        read behind their writes, and the swap decides. Raises: Conflict (fencing)."""
        found = await self.store.read_pointer()
        ref = parse_stored_pointer(found.text)
        if found.text in self.ours or ref is None:
            return
        if ref.run_id != self.run_id or ref.version > self.pointer.version:
            self._take_back(found, lost=True)

    async def move_pointer(self, ref: Ref) -> None:
        """Point to a sealed version, durably.

        A swap of unknown outcome is read back and, if it took effect, written again, so that it
        is known to be durable. Raises: Conflict (fencing) if another writer moved the pointer;
        Unavailable if the outcome cannot be learnt.
        """
        text = str(ref)
        if self.pointer != ref:
            decide_pointer_move(self.pointer, ref)
        self.ours.add(text)
        reason = "the pointer kept changing"
        for _ in range(_SWAP_TRIES):
            result: SwapResult = await self.store.swap_pointer(self.token, text)
            if isinstance(result, Won):
                self.token, self.pointer = result.token, ref
                self.ours = {text}
                return
            if isinstance(result, Unknown):
                reason = result.reason
                found = await self.store.read_pointer()
            else:
                found = PointerRead(result.text, result.token)
            self._take_back(found, lost=isinstance(result, Lost))
        raise Unavailable(f"the pointer could not be moved to {ref}: {reason}", ref=text)

    def _take_back(self, found: PointerRead, *, lost: bool) -> None:
        """Accept a pointer that is where we left it or where we put it; else we are fenced."""
        if found.text in self.ours or found.text == str(self.pointer):
            self.token = found.token
            return
        if lost or parse_stored_pointer(found.text) != self.pointer:
            self.fence = fenced(
                f"another writer moved the pointer to {found.text[:80]!r} from {self.pointer}",
                found=found.text[:100],
                expected=str(self.pointer),
            )
            raise self.fence
