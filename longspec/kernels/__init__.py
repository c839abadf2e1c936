"""The operations of decoding and training, in a folder per backend: each of them is in one module of a folder.

- `backend`: all operations; `choice`: which backend runs where.
- `torch`: for any device and dtype; `triton`: Triton kernels for NVIDIA GPUs; `native`: C for CPUs.
- `training`: attention over packed segments.
- `shared`: types, and the properties of devices.

Shape letters in all docstrings are those of CONTRIBUTING.md: B batch, N tree nodes, H query heads, K KV heads, D head
dim, S cache slots, V vocabulary, L layers. A file that needs further letters defines them at its top. Importing this
package loads neither torch nor triton.
"""

ATTENTIONS = ("flash", "triton", "native", "sdpa")
"""Names of decoding's attention, fastest first."""
DETERMINISTIC = "deterministic"
"""Name of the attention that belongs to the backend of `triton.deterministic`; never chosen unless requested."""
