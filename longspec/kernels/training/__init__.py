"""Attention over packed segments and the loss, with gradients."""
