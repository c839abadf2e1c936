"""Kernels that start before the previous one has ended (programmatic dependent launch).

Such a kernel calls `gdc_launch_dependents` when its successor may start, and `gdc_wait` before it reads what another
kernel of the pass writes, and before it writes anything. Every one of them waits, so the end of a kernel implies that
of all kernels before it. A kernel that is launched without the option waits by itself.
"""

import triton
import triton.language as tl


def overlap_options(overlap: bool) -> dict[str, bool]:
    """Keyword arguments of a launch: the kernel's `OVERLAP`, and an option that older versions of Triton lack."""
    return {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}


@triton.jit
def prefetch(pointers):
    """Start to move the lines of 128 bytes at the pointers into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
