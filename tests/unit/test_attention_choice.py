"""Selection of the attention backend, and the warnings about replaced or missing ones."""

import logging
import subprocess
import sys
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch

from longspec.errors import UserError, warn_once
from longspec.kernels import choice
from longspec.kernels.choice import attention_name, backend_of, choose_backend
from longspec.kernels.training import varlen_flash
from longspec.kernels.training.varlen_flash import resolve_attention


def test_unknown_and_unsupported_backends_raise_an_error_that_names_them() -> None:
    for name, problem in [("fast", "unknown backend 'fast'"), ("triton", "CUDA"), ("flash", "CUDA")]:
        with pytest.raises(UserError, match=problem):
            choose_backend(name, torch.device("cpu"), torch.bfloat16, 128)


@pytest.mark.parametrize(
    ("capability", "rocm", "reason"),
    [((7, 5), None, "compute capability 7.5"), ((9, 4), "6.4.0", "ROCm"), ((9, 0), "6.4.0", "ROCm")],
)
def test_a_gpu_before_ampere_and_one_under_rocm_run_on_torchs_own_kernels(
    capability: tuple[int, int],
    rocm: str | None,
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line says so. torch reports an MI300 as a CUDA device of capability 9.4, which is not a Hopper GPU."""
    gpu = torch.device("cuda")
    memories = (warn_once, varlen_flash._torch_has_flash)
    for remembered in memories:
        remembered.cache_clear()
    monkeypatch.setattr(choice, "_installed", lambda module: True)
    monkeypatch.setattr(torch.version, "hip", rocm)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)

    assert {attention_name("auto", gpu, torch.bfloat16, 128) for _ in range(3)} == {"sdpa"}
    assert len(caplog.records) == 1 and reason in caplog.text
    assert backend_of(gpu, torch.float32).name == "torch"
    assert not varlen_flash.runs(gpu, torch.bfloat16, 128)
    for remembered in memories:
        remembered.cache_clear()


@pytest.mark.parametrize(
    ("installed", "dtype", "used", "named"),
    [
        (("triton", "fa3_fwd_interface"), torch.bfloat16, "flash", []),
        (("triton", "fa3_fwd_interface"), torch.float16, "triton", ["FlashAttention-3 takes bfloat16"]),
        (("triton",), torch.float16, "triton", []),
        (("triton",), torch.bfloat16, "triton", ["fa3_fwd_interface"]),
        ((), torch.float16, "sdpa", ["triton"]),
    ],
)
def test_auto_selects_the_fastest_backend_and_logs_missing_packages_once(
    installed: tuple[str, ...],
    dtype: torch.dtype,
    used: str,
    named: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a Hopper GPU. A missing package that does not take the dtype is not logged; an installed one is."""
    warn_once.cache_clear()
    monkeypatch.setattr(choice, "_installed", lambda module: module in installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    properties = SimpleNamespace(major=9, multi_processor_count=132, shared_memory_per_block_optin=2**17)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with caplog.at_level(logging.WARNING):
        names = {attention_name("auto", torch.device("cuda"), dtype, 128) for _ in range(3)}
    assert names == {used}
    assert len(caplog.records) == len(named) and all(module in caplog.text for module in named)


def test_flash_attention_falls_back_to_sdpa_and_logs_it_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen_flash, "installed_flash_attention", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    warn_once.cache_clear()
    assert resolve_attention("flash_attention_2") == "sdpa" and not caplog.records, "a CPU has nothing to install"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = [resolve_attention("flash_attention_2") for _ in range(3)]
    assert names == ["sdpa"] * 3
    assert len(caplog.records) == 1 and "flash_attention_2" in caplog.text and "PyTorch's own" in caplog.text
    assert "decoding" not in caplog.text, "decoding chooses its own attention, by length on some GPUs"


def test_other_attention_names_are_kept_and_unknown_ones_raise_an_error() -> None:
    assert [resolve_attention(name) for name in (None, "sdpa", "eager")] == ["sdpa", "sdpa", "eager"]
    with pytest.raises(UserError, match="flash_atention"):
        resolve_attention("flash_atention")


def test_cpu_decoding_needs_no_triton() -> None:
    program = """
        import sys
        sys.modules["triton"] = None  # importing it now fails
        import torch
        from longspec.kernels.choice import choose_backend
        from longspec.kernels.training.varlen_flash import training_attention
        x = torch.ones(1, 1, 2, 16)
        mask = torch.ones(1, 1, 1, dtype=torch.bool)
        attend = choose_backend("auto", torch.device("cpu"), torch.float32, 16).attention
        print(attend.hybrid(torch.tensor([1]), mask)(x[:, :, :1], x, x, 1.0).sum().item())
    """
    run = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "16.0"
