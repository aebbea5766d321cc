"""stitch.stores."""
