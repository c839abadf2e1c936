"""The operations of decoding and training, as Triton kernels and in torch. Importing the package loads neither."""

BACKENDS = ("flash", "triton", "sdpa")
"""Backends of decoding's attention, fastest first."""
