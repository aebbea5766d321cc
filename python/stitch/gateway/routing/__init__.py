"""Who takes a request: one policy per file. Policies are pure; the dispatcher reserves."""

from __future__ import annotations

__all__: list[str] = []
