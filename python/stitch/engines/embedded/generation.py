"""One sample being generated: what was asked, and how far it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stitch.engines.embedded.params import SamplingParams
from stitch.engines.embedded.text import TextStream
from stitch.types import Label, Prefix, Span

__all__ = ["Ask", "Generation", "Progress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One sample as requested. `group` is the rid of the HTTP request it belongs to.

    logprob_start: first prompt position whose log-probability is wanted; None for none.
    """

    rid: str
    group: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    stream: bool = False
    return_logprob: bool = False
    logprob_start: int | None = None
    top_logprobs: int = 0
    extra_key: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """A consistent view for the HTTP side: the first `tokens` output tokens and their text.

    Lists of the generation only ever grow, so reading a prefix of them is safe while the
    scheduler goes on. `finish` is set once, in the last progress.
    """

    tokens: int
    text: str
    finish: dict[str, Any] | None


@dataclass(slots=True, eq=False)
class Generation:
    """Scheduler-side state; only the scheduler thread changes it.

    pages: key/value pages held; `computed` tokens of prompt + output have their state there.
    stale: that state comes from other weights than the present ones.
    runs: output tokens by label and prefix, as [label, exact, start, end].
    """

    ask: Ask
    sink: Callable[[Progress], None]
    stream: TextStream | None = None
    tokens: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[float, int]]] = field(default_factory=list)
    input_logprobs: list[float | None] = field(default_factory=list)
    input_tops: list[list[tuple[float, int]] | None] = field(default_factory=list)
    runs: list[tuple[Label | None, bool, int, int]] = field(default_factory=list)
    prompt_label: Label | None = None
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    stale: bool = False
    chain: list[bytes] = field(default_factory=list)
    chain_root: bytes = b""
    cached_tokens: int | None = None
    finish: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.ask.prompt)

    @property
    def prompt_length(self) -> int:
        """Prompt tokens."""
        return len(self.ask.prompt)

    @property
    def pending(self) -> int:
        """Tokens whose state is still to be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    def drop_state(self) -> list[int]:
        """Forget all key/value state; returns the pages to release."""
        pages, self.pages = self.pages, []
        self.computed = 0
        self.stale = False
        self.chain = []
        return pages

    def accept(self, token: int, *, label: Label | None) -> None:
        """Append one output token, stamped with the label in force in this very step."""
        at = len(self.output)
        exact = not self.stale
        if self.runs and self.runs[-1][0] == label and self.runs[-1][1] == exact:
            self.runs[-1] = (label, exact, self.runs[-1][2], at + 1)
        else:
            self.runs.append((label, exact, at, at + 1))
        self.output.append(token)
        self.counts[token] += 1
        self.tokens.append(token)

    def spans(self, count: int) -> list[Span] | None:
        """Version spans of the first `count` output tokens; None if any label is unknown."""
        found = []
        for label, exact, start, end in list(self.runs):
            if start >= count:
                break
            if label is None:
                return None
            prefix = Prefix.EXACT if exact else Prefix.CARRIED
            found.append(Span(label.ref, start, min(end, count), prefix))
        return found
