"""stitch.format."""
