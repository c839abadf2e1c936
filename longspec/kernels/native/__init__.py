"""Kernels of decoding on a CPU, written in C and compiled at their first use."""
