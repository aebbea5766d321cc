"""The gate between requests and activation on one replica."""
