"""Decoding and training on NVIDIA GPUs: Triton kernels, and FlashAttention-3 where it is faster."""
