"""stitch.reconciler."""
