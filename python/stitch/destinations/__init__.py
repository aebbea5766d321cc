"""stitch.destinations."""
