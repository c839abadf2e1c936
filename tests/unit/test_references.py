"""Each function that launches a kernel has a torch reference with its name and signature in the same folder."""

import ast
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")

KERNELS = Path(__file__).resolve().parents[2] / "longspec" / "kernels"
REFERENCES = {
    "decoding.compaction": "decoding.tree_reference",
    "decoding.descent": "decoding.tree_reference",
    "decoding.flash_attention": "decoding.attention_reference",
    "decoding.lookup_branches": "decoding.lookup_reference",
    "decoding.node_selection": "decoding.tree_reference",
    "decoding.prefix_attention": "decoding.attention_reference",
    "decoding.rejection": "decoding.tree_reference",
    "decoding.row_argmax": "decoding.tree_reference",
    "decoding.row_noise_kernel": "decoding.row_noise",
    "decoding.skinny_product": "decoding.product_reference",
    "decoding.tree_attention": "decoding.attention_reference",
    "decoding.tree_growth": "decoding.tree_reference",
    "decoding.vector_product": "decoding.product_reference",
    "decoding.window_attention": "decoding.attention_reference",
    "shared.elementwise": "shared.reference",
    "shared.logit_statistics": "shared.reference",
    "training.divergence": "training.reference",
    "training.varlen": "training.reference",
}


def module(name: str) -> ModuleType:
    return importlib.import_module(f"longspec.kernels.{name}")


def launchers(name: str) -> list[str]:
    """Public functions of a module that launch a kernel, `_x_kernel[grid](...)`, directly or through a private one."""
    tree = ast.parse((KERNELS / f"{name.replace('.', '/')}.py").read_text())
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


def test_every_file_with_a_kernel_is_listed() -> None:
    with_kernels = set()
    for file in KERNELS.rglob("*.py"):
        name = ".".join(file.relative_to(KERNELS).with_suffix("").parts)
        if launchers(name):
            with_kernels.add(name)
    assert with_kernels <= set(REFERENCES)


@pytest.mark.parametrize("name", REFERENCES)
def test_each_launcher_has_a_reference_with_its_signature(name: str) -> None:
    functions = launchers(name)
    if name == "decoding.flash_attention":
        functions.append("flash_prefix")  # launches a kernel of fa3-fwd
    if name == "training.varlen":
        functions += ["varlen_attention", "block_attention"]  # launch kernels of flash-attn or torch
    assert functions
    for function in functions:
        reference = getattr(module(REFERENCES[name]), function, None)
        assert reference is not None, f"{name}.{function} has no reference"
        assert signature(reference) == signature(getattr(module(name), function)), function
