"""Each function that launches a kernel has a plain torch counterpart with its name and signature.

For an operation of the backends that is torch's, which the tests compare with brute force; for a kernel that other
backends do not have, a reference among the tests.
"""

import ast
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")

from longspec.kernels.backend import Backend
from longspec.kernels.torch.attention import DecodingAttention
from longspec.kernels.triton.attention import TritonAttention
from longspec.kernels.triton.backend import TritonBackend

KERNELS = Path(__file__).resolve().parents[2] / "longspec" / "kernels" / "triton"
REFERENCES = {
    "deterministic": "attention_reference",
    "flash_attention": "attention_reference",
    "paged_attention": "attention_reference",
    "prefix_attention": "attention_reference",
    "token_attention": "attention_reference",
    "tree_attention": "attention_reference",
    "elementwise": "layer_reference",
    "logit_statistics": "layer_reference",
    "skinny_product": "product_reference",
    "vector_product": "product_reference",
}
"""Modules of the tests with the references of a module's kernels."""


def launchers(name: str) -> list[str]:
    """Public functions of a module that launch a kernel, `_x_kernel[grid](...)`, directly or through a private one."""
    tree = ast.parse((KERNELS / f"{name}.py").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    launching = {name for name, node in functions.items() if launches(node)}
    private = {name for name in launching if name.startswith("_")}
    for name, node in functions.items():
        if called_names(node) & private:
            launching.add(name)
    return sorted(launching - private)


def launches(function: ast.FunctionDef) -> bool:
    subscripts = (node.value for node in ast.walk(function) if isinstance(node, ast.Subscript))
    return any(isinstance(value, ast.Name) and value.id.endswith("_kernel") for value in subscripts)


def called_names(function: ast.FunctionDef) -> set[str]:
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return {call.id for call in calls if isinstance(call, ast.Name)}


def signature(function: Callable[..., object]) -> list[tuple[object, ...]]:
    """Name, kind and default of each parameter; annotations may be strings in one module and types in the other."""
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


@pytest.mark.parametrize("name", sorted(file.stem for file in KERNELS.glob("*.py")))
def test_each_launcher_has_a_counterpart_with_its_signature(name: str) -> None:
    functions = launchers(name)
    if name == "flash_attention":
        functions.append("flash_prefix")  # launches a kernel of fa3-fwd
    module = importlib.import_module(f"longspec.kernels.triton.{name}")
    for function in functions:
        kernel = getattr(module, function)
        if getattr(TritonBackend, function, None) is kernel:
            counterpart = getattr(Backend, function)
        elif kernel in (TritonAttention.window, TritonAttention.masked):
            counterpart = getattr(DecodingAttention(), function.removesuffix("_attention"))
        else:
            counterpart = getattr(importlib.import_module(REFERENCES[name]), function, None)
        assert counterpart is not None, f"{name}.{function} has no counterpart"
        assert signature(counterpart) == signature(kernel), function


def test_the_backend_of_gpus_has_its_own_operations() -> None:
    """torch's would wait for the device."""
    operations = {name for name, member in vars(Backend).items() if isinstance(member, staticmethod)}
    assert operations and operations <= vars(TritonBackend).keys()
    for name in operations:
        assert signature(getattr(TritonBackend, name)) == signature(getattr(Backend, name)), name


def test_references_are_among_the_tests_alone() -> None:
    """No file of the package computes what only tests need."""
    assert not [file for file in KERNELS.parent.rglob("*reference*")]
