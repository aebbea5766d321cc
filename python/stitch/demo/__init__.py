"""`stitch demo`: a small asynchronous RL job whose every token is checked against its label."""
