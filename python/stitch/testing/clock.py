"""Virtual time: an event loop whose clock jumps to the next timer instead of waiting for it.

Everything that sleeps through `Env.clock` (or asyncio itself) runs in no real time and in the
same order every time. Threads and sockets do not mix with it: offloaded work runs inline.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from stitch.env import Env, Files, OsFiles

__all__ = [
    "InlineOffload",
    "SeededRandomness",
    "VirtualClock",
    "VirtualTimeLoop",
    "run_virtual",
    "virtual_env",
]

T = TypeVar("T")

# A run that reaches this much virtual time without ending is taken for a hang.
_HORIZON_S = 1e7


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: what the loop would wait for, the clock jumps over."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError("every task waits for something that no timer will bring about")
        self.now += max(0.0, timeout)
        if self.now > _HORIZON_S:
            raise RuntimeError(f"still running after {_HORIZON_S:g} virtual seconds")
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`loop.time()` starts at 0 and moves only when every task waits for a timer."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        # A timer is due when it is reached, not half a real clock tick before.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.now


class VirtualClock:
    """The running loop's clock. Under `VirtualTimeLoop` it is virtual. Wall time starts at 0."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(seconds)


class SeededRandomness:
    """The same numbers for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def random(self) -> float:
        return self._random.random()

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def nonce(self) -> str:
        return f"{self._random.getrandbits(64):016x}"


class InlineOffload:
    """Runs the work at once, on the loop: deterministic, and right for small files."""

    async def __call__(self, work: Callable[[], T], /) -> T:
        return work()


def virtual_env(seed: int, *, files: Files | None = None) -> Env:
    """All ports for one deterministic run. Use inside `run_virtual`."""
    return Env(
        clock=VirtualClock(),
        random=SeededRandomness(seed),
        files=files if files is not None else OsFiles(),
        offload=InlineOffload(),
    )


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main()` to its end in virtual time on a fresh loop."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())
