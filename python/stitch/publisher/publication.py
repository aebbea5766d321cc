"""What `publish` returns: a handle on one publication under way, and its outcome."""

from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass

from stitch.errors import StitchError, Unavailable
from stitch.types import Kind, Ref

__all__ = ["LiveReport", "Publication", "Published"]


@dataclass(frozen=True, slots=True)
class Published:
    """A version that is sealed and pointed to.

    bytes, files: what was written over all ranks, manifest and index included (`stitch store show`
    leaves those two out). changed: tensors that differ from the version before. encode_s is this
    rank's, before `publish` returned. created: False if an equal version was there already and
    nothing was written.
    """

    ref: Ref
    kind: Kind
    bytes: int
    files: int
    changed: int
    encode_s: float
    seal_s: float
    target_digest: str
    manifest_digest: str
    created: bool


@dataclass(frozen=True, slots=True)
class LiveReport:
    """Who serves a version: replica ids, and for each one that does not, why."""

    version: int
    live: tuple[str, ...]
    missing: dict[str, str]
    wanted: int

    @property
    def enough(self) -> bool:
        """Whether as many replicas are live as were asked for."""
        return len(self.live) >= self.wanted


class Publication:
    """One publication. Safe to use from any thread; it never needs to be waited for."""

    def __init__(self, ref: Ref, kind: Kind) -> None:
        self.ref = ref
        self._kind = kind
        self._future: concurrent.futures.Future[Published] = concurrent.futures.Future()

    @property
    def kind(self) -> Kind:
        """Planned until done, then what was written: a plan may turn into an anchor."""
        if self._future.done() and self._future.exception() is None:
            return self._future.result().kind
        return self._kind

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None while it runs and after success."""
        return self._future.exception() if self._future.done() else None

    def wait(self, timeout: float | None = None) -> Published:
        """Wait until the version is sealed and pointed to.

        Raises: what it failed with (Conflict, InvalidInput, Unavailable …); Unavailable when
            `timeout` seconds pass first (it goes on in the background).
        """
        try:
            return self._future.result(timeout)
        except concurrent.futures.TimeoutError as error:
            if self._future.done():
                raise
            raise Unavailable(f"{self.ref} is not published after {timeout} s") from error

    def resolve(self, outcome: Published | BaseException) -> None:
        """End it. Called once, by the publisher."""
        if isinstance(outcome, BaseException):
            if not isinstance(outcome, StitchError):
                outcome.__traceback__ = None
            self._future.set_exception(outcome)
        else:
            self._future.set_result(outcome)
