"""Compile the kernel of paged attention for a Hopper GPU, which needs none, and print its bytes of shared memory.

In a process of its own, because tests on a CPU import Triton as its interpreter.
"""

import sys
from typing import Any

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from longspec.kernels.triton.attention_tiles import Tiles
from longspec.kernels.triton.paged_attention import _paged_parts_kernel

POINTERS = {"slots_ptr": "*i32", "mask_ptr": "*u8", "out_ptr": "*fp32", "lse_ptr": "*fp32"}
POINTERS |= dict.fromkeys(("begins_ptr", "ends_ptr", "mask_starts_ptr"), "*i64")


def shared_memory(tiles: Tiles, head_dim: int) -> int:
    """Bytes of shared memory in bf16, with the alignments of SGLang's pools."""
    kernel, options = _paged_parts_kernel, tiles.options(head_dim) | {"OVERLAP": True}
    launch = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        kind = POINTERS.get(name, "*bf16") if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in options else "fp32" if name == "scale_log2" else kind
    names = list(signature)
    aligned = [name for name in names if name.endswith("_ptr") or name.startswith("stride")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    constants: Any = {(names.index(name),): value for name, value in options.items()}
    source = ASTSource(kernel, signature, constants, attributes)
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=launch).metadata.shared


if __name__ == "__main__":
    *tiles, head_dim = map(int, sys.argv[1:])
    print(shared_memory(Tiles(*tiles), head_dim))
