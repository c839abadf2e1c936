"""Compiles `decoding.c` for this machine's CPU and loads it. The compiled file is kept in the user's cache."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from longspec.errors import first_line
from longspec.replacing import replacing
from longspec.user_cache import announce_first_use, user_cache

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("decoding.c")
FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-fPIC"),
    # Loops with exp, rint or sqrt become vector instructions. Results do not change.
    *("-fno-math-errno", "-fno-trapping-math"),
    # Without it, some versions of GCC fuse multiplications and additions for some numbers of tokens only.
    "--param=avoid-fma-max-bits=0",
    "-fopenmp",
)
COMPILE_S = 120
"""Limit of the compiler's time in seconds; it needs about 3."""

Pointer, Long, Float, Int = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
ARGUMENTS = {
    "product": [Pointer] * 5 + [Long] * 3 + [Int],
    "gated_product": [Pointer] * 4 + [Long] * 3 + [Int],
    "rms_norm": [Pointer] * 3 + [Long] * 2 + [Float],
    "rotate_and_store": [Pointer] * 10 + [Float] + [Long] * 6,
    "attention": [Pointer] * 7 + [Long] * 12 + [Float, Int],
}
"""Types of the functions' arguments; none returns a value."""


@cache
def native_library() -> ctypes.CDLL | None:
    """The compiled functions; None, with one warning, if they cannot be compiled or loaded here."""
    try:
        library = ctypes.CDLL(str(_compiled()))
        for name, arguments in ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: the user has no home
        # The first error in the compiler's output, otherwise the exception's own message, as one line.
        output = (getattr(error, "stderr", None) or "").splitlines()
        reason = next((line for line in output if "error:" in line), first_line(error))
        logger.warning("decoding on the CPU is slower than it could be: no compiled kernels (%s)", reason)
        return None
    return library


def _compiled() -> Path:
    """The compiled file, which another process may compile at the same time. Raises OSError or SubprocessError."""
    if (compiler := shutil.which("gcc")) is None:
        raise FileNotFoundError("gcc is not installed")

    # A home folder can be shared by machines with different CPUs and compilers.
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=COMPILE_S)
    key = "\0".join([SOURCE.read_text(), *FLAGS, version.stdout, _cpu()])
    target = user_cache("native") / f"decoding-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        announce_first_use()
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as linked, tempfile.TemporaryDirectory() as folder:
            compiled = os.path.join(folder, "decoding.o")
            # Without -fopenmp, the second step links no OpenMP runtime: torch has loaded its own, and two disturb each
            # other.
            for command in (["-c", str(SOURCE), "-o", compiled, *FLAGS], ["-shared", compiled, "-o", str(linked)]):
                subprocess.run([compiler, *command], capture_output=True, text=True, check=True, timeout=COMPILE_S)
    return target


def _cpu() -> str:
    """What the compiled code depends on: the architecture and the CPU's instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()} {features}"


def runs_native(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the functions take tensors of this device and dtype."""
    return device.type == "cpu" and dtype == torch.float32 and native_library() is not None
