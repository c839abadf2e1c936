"""Writes the API reference from the docstrings, as HTML: `python -m scripts.api_reference FOLDER` (`make api`)."""

import argparse
from importlib import import_module
from pathlib import Path

import pdoc
from pdoc import render

import longspec

MODULES = (
    "longspec",
    "longspec.inference.generate",
    "longspec.inference.stats",
    "longspec.inference.methods",
    "longspec.inference.drafting.decoder",
    "longspec.inference.drafting.decoders",
    "longspec.inference.drafting.proposal",
    "longspec.inference.cache",
    "longspec.inference.runner",
    "longspec.models.glide",
    "longspec.models.draft",
    "longspec.models.draft_layer",
    "longspec.models.draft_files",
    "longspec.models.draft_saving",
    "longspec.train.losses",
    "longspec.train.config_schema",
    "longspec.data.aligners",
    "longspec.errors",
)
"""The public names, and the modules that extensions use."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to write")
    folder = parser.parse_args().folder
    # Public names are imported at their first use, and pdoc looks at imported ones only.
    for name in longspec.__all__:
        getattr(longspec, name)
    modules = [*MODULES, *sorted({getattr(longspec, name).__module__ for name in longspec.__all__})]
    for module in modules:
        import_module(module)
    render.configure(docformat="markdown", footer_text=f"longspec {longspec.__version__}")
    pdoc.pdoc(*dict.fromkeys(modules), output_directory=folder)
    print(f"API reference: {folder / 'index.html'}")


if __name__ == "__main__":
    main()
