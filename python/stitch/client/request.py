"""The `/generate` request that the client sends. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stitch.errors import InvalidInput
from stitch.http.wire import FIELD, constraint_to_wire
from stitch.types import UNCONSTRAINED, Constraint

__all__ = ["AFFINITY_HEADER", "chat_body", "generate_body", "request_headers"]

AFFINITY_HEADER = "x-stitch-affinity"


def generate_body(
    prompt: str | None,
    input_ids: Sequence[int] | None,
    *,
    constraint: Constraint,
    sampling: Mapping[str, Any],
    n: int | None,
    return_logprob: bool,
    stream: bool,
    wait_ms: int | None,
) -> dict[str, Any]:
    """The JSON body. `wait_ms` fills in the constraint's own wait where that is absent.

    Raises: InvalidInput unless exactly one of `prompt` and `input_ids` is given, and n >= 1.
    """
    if (prompt is None) == (input_ids is None):
        raise InvalidInput("give exactly one of prompt and input_ids", param="prompt")
    if n is not None and n < 1:
        raise InvalidInput(f"n is {n}; ask for at least one sample", param="n")
    body: dict[str, Any] = {"text": prompt} if input_ids is None else {"input_ids": [*input_ids]}
    body["sampling_params"] = {**sampling, **({} if n is None else {"n": n})}
    body["return_logprob"] = return_logprob
    body["stream"] = stream
    return with_constraint(body, constraint, wait_ms)


def chat_body(
    body: Mapping[str, Any], *, constraint: Constraint, wait_ms: int | None
) -> dict[str, Any]:
    """An OpenAI body with the constraint added; everything else passes through."""
    return with_constraint(dict(body), constraint, wait_ms)


def with_constraint(
    body: dict[str, Any], constraint: Constraint, wait_ms: int | None
) -> dict[str, Any]:
    """`body` with its constraint field; none is added for a request without demands.

    Raises: InvalidInput for anything but a constraint.
    """
    if not isinstance(constraint, Constraint):
        raise InvalidInput(
            f"constraint is {constraint!r}; give at_least(v), exactly(v) or lag(k)",
            param="constraint",
        )
    if constraint != UNCONSTRAINED:
        field = constraint_to_wire(constraint)
        if wait_ms is not None:
            field.setdefault("max_wait_ms", wait_ms)
        body[FIELD] = field
    return body


def request_headers(affinity: str | None) -> dict[str, str]:
    """Headers beyond the content type."""
    return {} if affinity is None else {AFFINITY_HEADER: affinity}
