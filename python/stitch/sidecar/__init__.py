"""stitch.sidecar."""
