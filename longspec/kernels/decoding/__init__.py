"""Attention over the KV cache, growth and acceptance of token trees, and matrix products of few rows."""
