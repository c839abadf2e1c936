"""The operations of decoding and training as Triton kernels, each with a plain torch reference, and as C for CPUs.

- `decoding`: attention over the KV cache, growth and acceptance of token trees, matrix products of few rows.
- `training`: attention over packed segments, the loss.
- `native`: decoding on a CPU.
- `shared`: kernels and device queries for both.

Shape letters in all docstrings are those of CONTRIBUTING.md: B batch, N tree nodes, H query heads, K KV heads, D head
dim, S cache slots, V vocabulary, L layers. A file that needs further letters defines them at its top. Importing this
package loads neither torch nor triton.
"""

BACKENDS = ("flash", "triton", "native", "sdpa")
"""Backends of decoding attention, fastest first."""
