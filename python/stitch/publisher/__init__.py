"""stitch.publisher."""
