"""Metrics of one publisher."""

from __future__ import annotations

from stitch.publisher.publication import Published
from stitch.telemetry import Metrics

__all__ = ["Measures"]


class Measures:
    """Counts publications. All methods belong to the loop thread."""

    def __init__(self) -> None:
        self._metrics = metrics = Metrics()
        metrics.counter("stitch_publish_total", "Publications by outcome: delta, anchor, failed.")
        metrics.counter("stitch_publish_bytes_total", "Bytes written, documents included.")
        metrics.histogram(
            "stitch_publish_encode_seconds", "From the call of publish to its return."
        )
        metrics.histogram("stitch_publish_seal_seconds", "Writing, sealing and pointing.")
        metrics.gauge("stitch_publish_version", "The newest published version.")

    def failed(self) -> None:
        """Count a publication that failed."""
        self._metrics.add("stitch_publish_total", outcome="failed")

    def published(self, published: Published) -> None:
        """Count one that is sealed and pointed to."""
        metrics, ref = self._metrics, published.ref
        metrics.add("stitch_publish_total", outcome=published.kind.value)
        metrics.add("stitch_publish_bytes_total", published.bytes)
        metrics.observe("stitch_publish_encode_seconds", published.encode_s)
        metrics.observe("stitch_publish_seal_seconds", published.seal_s)
        metrics.set("stitch_publish_version", ref.version, run_id=ref.run_id)

    async def text(self) -> str:
        """The page, in Prometheus' text form."""
        return self._metrics.text()
