"""stitch.testing."""
