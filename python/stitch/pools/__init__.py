"""stitch.pools."""
