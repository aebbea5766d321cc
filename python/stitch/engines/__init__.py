"""stitch.engines."""
