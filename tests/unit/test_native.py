"""The compiled kernels of a CPU against plain references, and the selection of backends, with its warnings."""

import logging
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import layer_reference as reference
import pytest
import torch
import torch.nn.functional as F
from attention_reference import attention_with_lse
from kernel_devices import random
from layer_reference import check_rotation
from pairs import make_pair

from longspec.errors import UserError, warn_once
from longspec.inference.fused_runner import make_runner
from longspec.inference.generate import generate
from longspec.kernels import choice
from longspec.kernels.choice import attention_name, backend_of, choose_backend
from longspec.kernels.native import library, operations
from longspec.kernels.native.backend import NativeBackend
from longspec.kernels.native.library import native_library
from longspec.kernels.native.operations import MOST_TOKENS
from longspec.kernels.shared.residual import HeadNorms
from longspec.kernels.training import varlen_flash
from longspec.kernels.training.varlen_flash import resolve_attention

CPU = torch.device("cpu")
WIDTHS = [(64, 96), (1, 1), (37, 5), (576, 51), (20, 130)]
"""Inputs and outputs of a product: multiples of a vector and of a block, and others."""


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=pytest.mark.gcc) for n in ("native", "haswell", "x86-64")]
)
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernels for this machine, with AVX2, and with the instructions of every x86 CPU."""
    if request.param != "native" and (platform.machine() != "x86_64" or " avx2 " not in library._cpu()):
        pytest.skip("needs an x86 CPU with AVX2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "FLAGS", (*library.FLAGS, f"-march={request.param}"))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        native_library.cache_clear()
        yield
    native_library.cache_clear()


@pytest.fixture
def forgotten(own_cache: Path) -> Iterator[None]:
    """An empty cache folder; what was loaded is forgotten before and after the test."""
    native_library.cache_clear()
    yield
    native_library.cache_clear()


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize(("size", "out"), WIDTHS)
def test_products_equal_their_references_for_every_number_of_tokens(size: int, out: int, threads: None) -> None:
    weight, bias = random(2 * out, size, seed=1) / size**0.5, random(2 * out, seed=2)
    for tokens in (*range(20), MOST_TOKENS):
        x = random(1, tokens, size)
        expected = x.double() @ weight.double().t()
        close = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(operations.product(x, weight).double(), expected, **close)
        torch.testing.assert_close(operations.product(x, weight, bias).double(), expected + bias, **close)
        total = random(1, tokens, 2 * out, seed=3)
        sums = total + expected
        operations.add_product(total, x, weight)
        torch.testing.assert_close(total.double(), sums, **close)
        gate, up = expected.chunk(2, -1)
        torch.testing.assert_close(operations.gated_product(x, weight).double(), F.silu(gate) * up, **close)


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("size", [576, 37])
def test_a_tokens_result_does_not_depend_on_the_number_of_tokens(size: int, threads: None) -> None:
    """So a tree's logits are those of vanilla decoding. The last token of each call is the same."""
    weight, token = random(130, size, seed=1), random(1, 1, size)
    k, v = random(2, 1, 2, 90, 20, seed=2)
    alone = None
    for tokens in (1, 2, 5, 6, 7, 12, 16, 32):
        x = torch.cat([random(1, tokens - 1, size, seed=3), token], 1)
        q = x[..., :20].expand(4, -1, -1)[None].contiguous()
        attended = operations.attention(q, k, v, torch.tensor([85], dtype=torch.int32), None, 0.2)
        found = [operations.product(x, weight)[0, -1], operations.gated_product(x, weight)[0, -1], attended[0, :, -1]]
        alone = alone or found
        assert all(map(torch.equal, found, alone)), tokens


@pytest.mark.usefixtures("build")
def test_a_gate_of_any_size_has_the_silu_of_torch() -> None:
    gate = torch.cat([torch.linspace(-100, 100, 4001), torch.tensor([-1e30, 1e30, 0.0, torch.nan])])
    weight = torch.cat([gate, torch.ones_like(gate)])[:, None].contiguous()
    found = operations.gated_product(torch.ones(1, 1, 1), weight)[0, 0]
    torch.testing.assert_close(found.double(), F.silu(gate.double()), rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("size", [1, 20, 576])
def test_rms_norm_equals_its_reference(size: int) -> None:
    x, weight = 3 * random(2, 5, size), random(size, seed=1)
    torch.testing.assert_close(operations.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (5, 5, 40), (0, 3, 8), (6, 1, 20)])
def test_rotate_and_store_equals_its_reference(heads: int, kv_heads: int, head_dim: int, has_norms: bool) -> None:
    norms = HeadNorms(random(head_dim, seed=4), random(head_dim, seed=5), 1e-5) if has_norms else None
    check_rotation(NativeBackend.stream, heads, kv_heads, head_dim, "cpu", norms)


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("head_dim", [16, 20, 7])
def test_attention_takes_every_head_dimension(head_dim: int, threads: None) -> None:
    """And keys and values that are parts of a larger cache."""
    q, stores = random(3, 6, 4, head_dim), random(2, 2, 3, 3, 40, head_dim, seed=1)
    k, v = stores[0, 1, :, 1:], stores[1, 1, :, 1:]
    lengths = torch.tensor([0, 31, 5], dtype=torch.int32)
    mask = random(3, 4, 4, seed=2) > 0
    visible = torch.zeros(3, 4, 40, dtype=torch.bool)
    for row, length in enumerate(lengths.tolist()):
        visible[row, :, :length] = True
        visible[row, :, length : length + 4] = mask[row]
    expected = attention_with_lse(q, k, v, visible, 0.3)[0]
    torch.testing.assert_close(operations.attention(q, k, v, lengths, mask, 0.3), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("build")
def test_nan_is_not_lost() -> None:
    """A model whose weights are broken is reported, not decoded."""
    x, weight = torch.full((1, 2, 32), torch.nan), random(8, 32)
    assert operations.product(x, weight).isnan().all() and operations.gated_product(x, weight).isnan().all()
    assert operations.rms_norm(x, torch.ones(32), 1e-5).isnan().all()
    q, k = random(1, 2, 1, 32), torch.full((1, 2, 9, 32), torch.nan)
    assert operations.attention(q, k, k, torch.tensor([9], dtype=torch.int32), None, 0.1).isnan().all()


def test_without_a_compiler_one_line_says_so_and_torch_decodes(
    forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = make_pair(tmp_path), torch.tensor([[3, 1, 4, 1, 5]])
    expected = generate(model, ids, max_new_tokens=8, eos_token_id=()).new_tokens[0]
    native_library.cache_clear()
    caplog.clear()
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    runner = make_runner(model, "auto", compiled=True)
    assert runner.backend.name == "torch" and runner.attention.name == "sdpa"
    assert torch.equal(generate(model, ids, max_new_tokens=8, eos_token_id=()).new_tokens[0], expected)
    assert caplog.text.count("gcc is not installed") == 1
    with pytest.raises(UserError, match="'native' cannot run here: it needs a CPU, float32 and gcc"):
        choose_backend("native", CPU, torch.float32, 64)


def test_unknown_and_unsupported_backends_raise_an_error_that_names_them() -> None:
    for name, problem in [("fast", "unknown backend 'fast'"), ("triton", "CUDA"), ("flash", "CUDA")]:
        with pytest.raises(UserError, match=problem):
            choose_backend(name, torch.device("cpu"), torch.bfloat16, 128)


@pytest.mark.parametrize(
    ("device", "reason"),
    [(((7, 5), None), "compute capability 7.5"), (((9, 4), "6.4.0"), "ROCm"), (((9, 0), "6.4.0"), "ROCm")],
)
def test_a_gpu_before_ampere_and_one_under_rocm_run_on_torchs_own_kernels(
    device: tuple[Any, str | None], reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says so. device: capability, ROCm version. An MI300 has the capability 9.4, as if a Hopper GPU."""
    gpu, (capability, rocm) = torch.device("cuda"), device
    memories = (warn_once, varlen_flash._torch_has_flash)
    for remembered in memories:
        remembered.cache_clear()
    monkeypatch.setattr(choice, "is_installed", lambda module: True)
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
    monkeypatch.setattr(choice, "is_installed", lambda module: module in installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    properties = SimpleNamespace(major=9, multi_processor_count=132, shared_memory_per_block_optin=2**17)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with caplog.at_level(logging.WARNING):
        assert {attention_name("auto", torch.device("cuda"), dtype, 128) for _ in range(3)} == {used}
    assert len(caplog.records) == len(named) and all(module in caplog.text for module in named)


def test_flash_attention_falls_back_to_sdpa_and_logs_it_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen_flash, "installed_flash_attention", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    warn_once.cache_clear()
    assert resolve_attention("flash_attention_2") == "sdpa" and not caplog.records, "a CPU has nothing to install"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [resolve_attention("flash_attention_2") for _ in range(3)] == ["sdpa"] * 3
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
