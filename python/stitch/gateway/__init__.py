"""stitch.gateway."""
