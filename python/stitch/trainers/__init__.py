"""stitch.trainers."""
