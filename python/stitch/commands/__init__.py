"""stitch.commands."""
