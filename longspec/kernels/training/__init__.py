"""Attention over packed segments, with gradients."""
