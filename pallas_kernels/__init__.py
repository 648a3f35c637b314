"""Fused decoding, binary matmul and block-sparse attention kernels for GPU and TPU (jax and numpy only)."""
