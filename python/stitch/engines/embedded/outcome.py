"""What one pass means for one sample: log-probabilities, the next token, and whether it ends."""

from __future__ import annotations

from typing import Any

from stitch.engines.embedded.generation import Generation
from stitch.engines.embedded.sampling import choose, log_softmax, top_tokens, uniform_at
from stitch.engines.embedded.text import TextCodec, TextStream
from stitch.types import Label

__all__ = ["Outcome"]

Finish = dict[str, Any]


class Outcome:
    """Turns logits into tokens and ends. Stateless but for its configuration."""

    def __init__(self, codec: TextCodec, *, eos: frozenset[int], context_tokens_max: int) -> None:
        self._codec = codec
        self._eos = eos
        self._context_tokens_max = context_tokens_max

    def wanted(self, sample: Generation, count: int) -> list[int]:
        """Offsets, among the next `count` tokens, whose logits are needed.

        The last one if the pass completes the sample, and prompt tokens whose successors'
        log-probabilities are asked for and not known yet.
        """
        last = [count - 1] if sample.pending == count else []
        start = sample.ask.logprob_start
        if start is None:
            return last
        # Logits at position p are about token p + 1.
        known = max(0, len(sample.input_logprobs) - 1)
        first = max(0, start + known - sample.computed)
        end = min(count, sample.prompt_length - 1 - sample.computed)
        return [*range(first, end), *last]

    def note_prompt(self, sample: Generation, rows: Any) -> None:
        """Keep log-probabilities of prompt tokens; the first one asked for has none."""
        ask = sample.ask
        assert ask.logprob_start is not None, "only asked-for log-probabilities are kept"
        if not sample.input_logprobs:
            sample.input_logprobs.append(None)
            sample.input_tops.append(None)
        for row in rows:
            at = ask.logprob_start + len(sample.input_logprobs)
            logprobs = log_softmax(row)
            sample.input_logprobs.append(float(logprobs[ask.prompt[at]]))
            sample.input_tops.append(top_tokens(logprobs, ask.top_logprobs))

    def next_token(self, sample: Generation, logits: Any, label: Label | None) -> Finish | None:
        """Choose a token and stamp it with `label`, the one in force in this pass.

        Returns: why the sample ends with it, or None.
        """
        ask, params = sample.ask, sample.ask.params
        at = len(sample.output)
        if at == 0:
            sample.prompt_label = label
        if params.max_new_tokens == 0:
            return {"type": "length", "length": 0}
        ends = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | self._eos
        choice = choose(
            logits,
            params,
            uniform=uniform_at(ask.seed, at),
            output_counts=sample.counts,
            prompt_tokens=frozenset(ask.prompt) if params.penalized else frozenset(),
            barred=ends if at < params.min_new_tokens else frozenset(),
        )
        if choice is None:
            reason = "the logits are not finite; the weights are damaged"
            return {"type": "abort", "message": reason, "failed": True}
        if ask.return_logprob:
            sample.logprobs.append(choice.logprob)
            sample.tops.append(top_tokens(choice.logprobs, ask.top_logprobs))
        sample.accept(choice.token, label=label)
        return self._end(sample, choice.token, ends)

    def _end(self, sample: Generation, token: int, ends: frozenset[int]) -> Finish | None:
        params = sample.ask.params
        stream = sample.stream
        if stream is None and (sample.ask.stream or params.stop):
            stream = sample.stream = TextStream(
                self._codec, skip_special_tokens=params.skip_special_tokens, stops=params.stop
            )
        if token in ends:
            if stream is not None and params.no_stop_trim:
                stream.push(token)
            return {"type": "stop", "matched": token}
        if stream is not None:
            before = len(stream.text)
            stream.push(token)
            stop = stream.find_stop(params.stop, before) if params.stop else None
            if stop is not None and len(sample.output) >= params.min_new_tokens:
                at, matched = stop
                stream.finish(cut_at=at + len(matched) if params.no_stop_trim else at)
                return {"type": "stop", "matched": matched}
        room = self._context_tokens_max - sample.prompt_length
        if len(sample.output) >= min(params.max_new_tokens, room):
            return {"type": "length", "length": len(sample.output)}
        return None

    def final_text(self, sample: Generation, finish: Finish) -> str:
        """The whole text of a sample that ends."""
        stream = sample.stream
        if stream is None:
            params = sample.ask.params
            ids = sample.output
            if finish["type"] == "stop" and not params.no_stop_trim:
                ids = ids[:-1]
            return self._codec.decode(ids, skip_special_tokens=params.skip_special_tokens)
        if not isinstance(finish.get("matched"), str):
            stream.finish()
        return stream.text
