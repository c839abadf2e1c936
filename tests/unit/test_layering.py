"""The layers of the house: kernels and models serve both sides, so they import neither."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "longspec"
COMMANDS = ("longbench", "regenerate", "cli")
FORBIDDEN = {
    "kernels": ("models", "data", "train", "inference", *COMMANDS),
    "models": ("data", "train", "inference", *COMMANDS),
    "data": ("models", "train", "inference", *COMMANDS),
    "ranks": ("kernels", "models", "data", "train", "inference", *COMMANDS),
    "train": ("inference", *COMMANDS),
    "inference": ("train", *COMMANDS),
    "longbench": ("train",),
    "regenerate": ("train",),
}


def imported_modules(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_layer_imports_only_what_lies_below_it(layer: str) -> None:
    for file in (PACKAGE / layer).rglob("*.py"):
        for other in FORBIDDEN[layer]:
            wrong = {name for name in imported_modules(file) if f"{name}.".startswith(f"longspec.{other}.")}
            assert not wrong, f"{file.relative_to(PACKAGE)} imports {wrong}"
