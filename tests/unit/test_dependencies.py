"""Imports: declared in pyproject.toml, of layers below alone, missed only where they are used, and never circular."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DISTRIBUTIONS = {"hydra": "hydra-core", "yaml": "pyyaml", "fa3_fwd_interface": "fa3-fwd", "pydantic_core": "pydantic"}
"""Distributions whose name is not that of their package."""
OURS = {"longspec", "scripts", "benchmarks", "experiments"}
TESTS = {file.stem for file in (ROOT / "tests").rglob("*.py")}
"""Modules that only tests may import."""
USED = {
    "longspec/inference/server": ["serve"],
    "longspec/cli/picture.py": ["demo"],
    "longspec/data": ["train"],
    "longspec/pipeline": ["demo"],
    "longspec/train": ["train"],
    "longspec/sglang": ["sglang"],
    "benchmarks": ["demo", "fa3"],
    "experiments": ["demo"],
    "scripts/api_reference.py": ["dev"],
    "scripts": ["demo"],
}
"""Extras that a module or a folder's modules may import; the tests may import those of `dev`, the rest none."""
ON_DEMAND = {
    "longspec/cli/train.py": ["train"],
    "longspec/kernels/triton/flash_attention.py": ["fa3"],
    "benchmarks/engine_runs.py": ["sglang"],
    "tests/sglang_run.py": ["sglang"],
}
"""Extras that a module imports inside a function."""
PEERS = {"vllm"}
"""Engines that `benchmarks.engines` compares with, each from an environment of its own."""


def requirements(*extras: str) -> set[str]:
    """The distributions that the package and these extras require."""
    found = set()
    for line in [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]:
        required = Requirement(line)
        if required.name == "longspec":
            found |= requirements(*required.extras)
        found.add(canonicalize_name(required.name))
    return found


def third_party_imports(file: Path) -> Iterator[tuple[str, bool]]:
    """The distribution of each import in a file, and whether it is imported together with the file."""
    ours = OURS | sys.stdlib_module_names | (TESTS if file.is_relative_to(ROOT / "tests") else set())
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for package in {name.partition(".")[0] for name in names}:
            if package not in ours:
                yield canonicalize_name(DISTRIBUTIONS.get(package, package)), node.col_offset == 0


@pytest.mark.parametrize("folder", ["longspec", "benchmarks", "experiments", "scripts", "tests"])
def test_every_import_is_declared(folder: str) -> None:
    undeclared = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        extras = next((extras for part, extras in USED.items() if f"{path}/".startswith(f"{part}/")), [])
        declared = requirements(*(["dev", "fa3"] if folder == "tests" else extras))
        on_demand = declared | requirements(*ON_DEMAND.get(path, []))
        for name, at_import in third_party_imports(file):
            if name not in (declared if at_import else on_demand | PEERS):
                undeclared.append(f"{path} imports {name}")
    assert not undeclared


def test_a_wheel_contains_the_embedded_drafts() -> None:
    """The repository's drafts are linked into the package, and its patterns cover a draft's files."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert (ROOT / "longspec" / "drafts").resolve() == ROOT / "drafts"
    assert any(Path("drafts/name/config.json").match(pattern) for pattern in setuptools["package-data"]["longspec"])
    files = [file.relative_to(ROOT / "drafts") for file in (ROOT / "drafts").rglob("*") if file.is_file()]
    assert all(len(file.parts) == 2 for file in files)


WITHOUT_EXTRAS = """
import importlib, pkgutil, sys

for package in {missing!r}:
    sys.modules[package] = None  # as if it were not installed
import longspec
assert "torch" not in sys.modules and longspec.__version__
for name in longspec.__all__:
    getattr(longspec, name)

from longspec.errors import reports_user_errors
from longspec.train.command import main as train
from longspec.longbench.command import main as evaluate

TRAIN_DATA = ("dataset", "tokenization", "packing", "cache")
TRAIN_ONLY = ("longspec.train.", *("longspec.data." + name for name in TRAIN_DATA))
SGLANG = ("longspec.sglang.algorithm", "longspec.sglang.greedy_round", "longspec.sglang.worker")
OTHERS = ("longspec.inference.server.", "longspec.cli.picture", "longspec.pipeline.", *SGLANG)
for module in pkgutil.walk_packages(longspec.__path__, "longspec."):
    if not module.name.startswith((*TRAIN_ONLY, *OTHERS)):
        importlib.import_module(module.name)
sys.stderr.write("everything else is imported\\n")

def build_dataset():
    from longspec.data.dataset import build_dataset

def serve():
    from longspec.cli.serve import serve; serve()

def run(*words):
    sys.argv = ["longspec", *words]
    app.main()

def experiment():
    from experiments.__main__ import main; main([])

from longspec.cli import app

commands = (lambda: train(["-cn", "any"]), build_dataset, lambda: run("train", "your-model"))
commands += (lambda: run("extract", "a", "b"), experiment, lambda: run("draft", "no/such/target"), serve)
commands += (lambda: run("bench", "no/such/pair", "--png", "a.png"), lambda: run("bench", "no/such/pair"))
for command in commands:
    try:
        reports_user_errors(command)()
    except SystemExit as end:
        assert end.code == 2
"""


def test_without_the_extras_all_but_training_serving_and_pictures_works() -> None:
    """`import longspec` is silent and loads no torch, and a command that needs an extra names it in one line."""
    missing = ["deepspeed", "fairscale", "datasets", "hydra", "omegaconf", "wandb", "matplotlib"]
    missing += ["starlette", "uvicorn", "prometheus_client"]
    command = [sys.executable, "-c", WITHOUT_EXTRAS.format(missing=missing)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    first, *lines = done.stderr.splitlines()
    assert first == "everything else is imported"
    *lines, picture, pair = lines
    assert "--png: matplotlib is not installed" in picture and "no/such/pair" in pair
    for line, extra in zip(lines, (*["train"] * 4, "demo", "demo", "serve"), strict=True):
        assert line.startswith("error: the package ") and line.endswith(f"; run: pip install 'longspec[{extra}]'")


@pytest.mark.parametrize("script", ["trainer_base_ds_mul_fs_tp.py", "inference_long-bench.py"])
def test_help_imports_no_library(script: str) -> None:
    command = [sys.executable, "-X", "importtime", script, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.stdout.startswith(f"usage: {script}")
    assert not imported & {"torch", "transformers", "deepspeed"}
    assert all(line.startswith("import time:") for line in done.stderr.splitlines())


PACKAGE = ROOT / "longspec"
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

FILES = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}
MODULES = {module.removesuffix(".__init__"): file for module, file in FILES.items()}


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
            inner = ast.walk(node.args[0] if literal else tree)
            names |= {str(one.value) for one in inner if isinstance(one, ast.Constant)}
    return {name for name in names if name.startswith("longspec.")}


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
