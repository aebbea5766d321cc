"""stitch.http."""
