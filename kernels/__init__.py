"""Triton kernels, shipped as `stitch.kernels`; importing this package does not import triton."""
