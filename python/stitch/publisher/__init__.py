"""Trainer-side publication: tensors in, sealed versions and a moved pointer out."""

from __future__ import annotations

from stitch.publisher.publication import LiveReport, Publication, Published
from stitch.publisher.publisher import Publisher

__all__ = ["LiveReport", "Publication", "Published", "Publisher"]
