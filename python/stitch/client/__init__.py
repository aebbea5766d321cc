"""stitch.client."""
