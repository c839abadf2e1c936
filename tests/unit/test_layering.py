"""The layers of the package: kernels and models serve training and decoding, so they import neither."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "longspec"
COMMANDS = ("longbench", "regenerate", "pipeline", "cli")
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


MODULES = {
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in PACKAGE.rglob("*.py")
}


@cache
def imported_modules(file: Path) -> set[str]:
    """The modules and names that a file imports, inside functions and by `import_module` too, but not for types only.

    Of a module name that is put together, the part that is known; of one that is looked up, all names in the file.
    """
    tree = ast.parse(file.read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    names: set[str] = set()
    for node in set(ast.walk(tree)) - for_types:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            literal = isinstance(node.args[0], ast.Constant | ast.JoinedStr)
            names |= {text for text in strings(node.args[0] if literal else tree) if text.startswith("longspec.")}
    return names


def strings(tree: ast.AST) -> set[str]:
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_layer_imports_only_what_lies_below_it(layer: str) -> None:
    for file in (PACKAGE / layer).rglob("*.py"):
        for other in FORBIDDEN[layer]:
            wrong = {name for name in imported_modules(file) if f"{name}.".startswith(f"longspec.{other}.")}
            assert not wrong, f"{file.relative_to(PACKAGE)} imports {wrong}"


def test_only_commands_import_the_server() -> None:
    """It translates between HTTP and the engine, which knows nothing of it."""
    server = "longspec.inference.server."
    for module, file in MODULES.items():
        if not f"{module}.".startswith((server, "longspec.cli.")):
            wrong = {name for name in imported_modules(file) if f"{name}.".startswith(server)}
            assert not wrong, f"{module} imports {wrong}"


def test_no_module_imports_itself_through_others() -> None:
    """Not even inside a function."""
    graph = {}
    for module, file in MODULES.items():
        names = imported_modules(file)
        unfinished = tuple(name for name in names if name.endswith("."))
        graph[module] = {other for other in MODULES if other in names or other.startswith(unfinished)} - {module}
    TopologicalSorter(graph).prepare()  # raises CycleError
