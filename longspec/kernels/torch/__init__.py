"""Decoding and training on torch's own operations, for any device and dtype."""
