"""stitch.rl."""
