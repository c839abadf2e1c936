"""The command `longspec draft`: from a target to a trained, measured draft."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longspec.command_line import Parser
from longspec.errors import UserError, reports_user_errors
from longspec.extras import extra

if TYPE_CHECKING:
    from longspec.pipeline.estimates import Estimate
    from longspec.pipeline.machine import Machine, Target
    from longspec.pipeline.samples import Samples
    from longspec.pipeline.settings import Settings

EXAMPLES = (
    "longspec draft Qwen/Qwen2.5-0.5B-Instruct",
    "longspec draft TARGET --hours 2 --text prompts.jsonl --output_dir outputs/mine --yes",
    "longspec draft TARGET --dry_run > settings.yaml",
    "longspec draft TARGET --evaluate DRAFT",
)
HOURS, CONTEXTS, EVALUATION_HOURS = 0.5, 32768, 0.1
GIB = 2**30


@reports_user_errors
def main(argv: Sequence[str] | None = None, prog: str = "longspec draft") -> None:
    """Train and measure a draft, or measure a published one. The same command continues after it was stopped."""
    options = _parser(prog).parse_intermixed_args(argv)
    with extra("demo"):
        import torch

        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed remarks it
        from longspec.inference.registry import choose_target
        from longspec.locks import locked
        from longspec.pipeline.estimates import estimate
        from longspec.pipeline.files import settings_file, write_atomically
        from longspec.pipeline.machine import Machine, Target
        from longspec.pipeline.settings import settings_yaml

    target = Target.read(options.target, choose_target(options.target))
    machine = Machine.here()
    root = Path(options.output_dir or _default_folder(options))
    settings = _settings(options, root, target, machine)
    planned = estimate(settings, target, machine)
    plan = plan_lines(settings, target, machine, planned, root)
    if options.dry_run:
        print("".join(f"# {line}\n" for line in plan) + settings_yaml(settings), end="")
        return
    print("\n".join(plan), flush=True)
    _check(options, target, machine, planned, root)
    if not options.yes and not settings_file(root).exists():
        _ask()
    root.mkdir(parents=True, exist_ok=True)
    with locked(root):
        write_atomically(settings_file(root), settings_yaml(settings))
        run(settings, root, planned, shlex.join([*prog.split(), *(sys.argv[2:] if argv is None else argv)]))


def run(settings: Settings, root: Path, planned: Estimate, command: str) -> None:
    """Run all steps, and write the report and the draft's folder. command: shown in the report."""
    from longspec.pipeline.published import write_draft
    from longspec.pipeline.report import measured, write_page
    from longspec.pipeline.samples import Samples
    from longspec.pipeline.steps import run_steps, steps_of

    run_steps(steps_of(settings, root), root, planned)
    page = root / "report.md"
    write_page(page, f"A draft for {settings.target}", settings, root, command, {})
    draft = settings.evaluation.draft
    if draft is None:
        write_draft(settings, root)
        draft = str(root / "draft")
        print(f"draft: {draft}")
    print(f"report: {page}")
    for name in ("chat", "serve", "bench"):
        print(shlex.join(["longspec", name, settings.target, "--draft", draft]))
    print(verdict(Samples.of_lines(measured(root))), flush=True)


def verdict(samples: Samples) -> str:
    """The last line: the draft's speed compared with that of prompt lookup."""
    ratio = samples.speed_up("tree", "lookup")
    if ratio.samples and ratio.value < 1:
        return (
            f"The draft is slower than prompt lookup on its held-out prompts: {ratio} x its tokens/s. Try a larger "
            "--hours, prompts like your own (--text FILE), or --method lookup, which needs no draft"
        )
    return (
        f"On held-out prompts, the draft's tree emits {samples.tokens_per_round('tree')} tokens per round and is "
        f"{ratio} x as fast as prompt lookup; auto is {samples.speed_up('auto', 'vanilla')} x as fast as vanilla"
    )


def plan_lines(settings: Settings, target: Target, machine: Machine, planned: Estimate, root: Path) -> list[str]:
    """What the run will do, for the user to confirm. All times are estimates."""
    from longspec.pipeline.steps import duration, steps_of

    shared = f", shared by {settings.tp_size} GPUs (training: ZeRO-3)" if settings.tp_size > 1 else ""
    billions, size = target.parameters / 1e9, target.bytes / GIB
    lines = [
        f"target: {target.name}, {target.config.model_type}, {billions:.3g}B parameters, "
        f"{target.config.num_hidden_layers} layers, {target.positions:,} positions",
        f"machine: {machine.name}; memory of the target: {size:.3g} GiB in bf16{shared}",
        f"output: {root}, about {planned.disk / GIB:.2g} GiB",
    ]
    for step in steps_of(settings, root):
        amount = f", {planned.tokens[step.name] / 1e6:,.3g}M tokens" if step.name in planned.tokens else ""
        lines.append(f"  {step.name}: {duration(planned.seconds[step.name])}{amount}")
    return [*lines, f"in all: {duration(planned.total)} (estimated)"]


def _settings(options: argparse.Namespace, root: Path, target: Target, machine: Machine) -> Settings:
    """The settings in `--config`, those of the run that the folder holds, or those chosen for target and machine."""
    from longspec.data.prompts import PromptFiles
    from longspec.models.draft_files import check_draft
    from longspec.models.families import family_class
    from longspec.models.target_files import read_config
    from longspec.pipeline.files import settings_file
    from longspec.pipeline.settings import load_settings
    from longspec.pipeline.sizes import chosen_settings, evaluation_of
    from longspec.pipeline.target import TargetText

    if options.evaluate:
        path = TargetText.load(options.target).path
        config = read_config(path)
        check_draft(options.evaluate, config, family_class(config, path).draft_layer_class)
    texts = [str(Path(file).absolute()) if Path(file).exists() else file for file in options.text]
    overrides = [f"target={options.target}", *options.overrides]
    if options.config:
        settings = load_settings(options.config, overrides)
        settings.text = texts or settings.text
    elif settings_file(root).exists():
        settings = load_settings(settings_file(root), overrides)
        given = {"target": options.target, "hours": options.hours, "contexts": options.contexts, "text": texts or None}
        for name, value in given.items():
            if value is not None and value != (stored := getattr(load_settings(settings_file(root)), name)):
                raise UserError(f"{root}: holds a run with {name} {stored}, not {value}; choose another --output_dir")
    else:
        own = len(PromptFiles(tuple(texts))) if texts else 0
        hours = options.hours or (EVALUATION_HOURS if options.evaluate else HOURS)
        contexts = options.contexts or CONTEXTS
        chosen = chosen_settings(target, machine, hours, contexts, texts, own, options.evaluate)
        settings = load_settings(chosen, overrides)
    return evaluation_of(options.evaluate, settings) if options.evaluate else settings


def _check(options: argparse.Namespace, target: Target, machine: Machine, planned: Estimate, root: Path) -> None:
    """Raise UserError if the run would take days on a CPU or fill the disk."""
    from longspec.pipeline.estimates import free_disk
    from longspec.pipeline.steps import duration

    limit = 3600 * 2 * (options.hours or HOURS)
    if not machine.gpus and planned.total > limit:
        raise UserError(
            f"{target.name}: this would take {duration(planned.total)} on {machine.name}; run it on a machine with a "
            "GPU, or give smaller settings with --config"
        )
    if planned.disk > free_disk(root):
        raise UserError(
            f"--output_dir {root}: needs about {planned.disk / GIB:.2g} GiB, {free_disk(root) / GIB:.2g} GiB are free"
        )


def _ask() -> None:
    """Raise UserError unless the user agrees."""
    if not sys.stdin.isatty():
        raise UserError("give --yes to start without a terminal")
    if input("start? [y/N] ").strip().lower() not in ("y", "yes"):
        raise SystemExit(1)


def _default_folder(options: argparse.Namespace) -> str:
    name = Path(options.target).stem if options.target.endswith(".gguf") else Path(options.target).name
    draft = f"-evaluates-{Path(options.evaluate).stem}" if options.evaluate else ""
    return f"outputs/{name.lower()}{draft}"


def _parser(prog: str) -> Parser:
    parser = Parser(
        EXAMPLES,
        prog=prog,
        usage="%(prog)s TARGET [options] [key=value ...]",
        description="Train a draft for a target and measure it: the target writes its text, short probes choose the\n"
        "layer that the draft reads, three stages train it, and every method decodes held-out prompts.\n"
        "The same command continues after it was stopped, also on another number of GPUs.",
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="name of a pair, folder, hub id or .gguf file")
    add("overrides", nargs="*", metavar="key=value", help="values that replace those of the settings")
    add("--output_dir", help="default: outputs/NAME")
    add("--hours", type=float, help=f"time to fill, default: {HOURS} (--evaluate: {EVALUATION_HOURS})")
    add("--contexts", type=int, help=f"longest context of training and evaluation, in tokens, default: {CONTEXTS}")
    add("--text", nargs="+", default=[], metavar="FILE", help="JSONL with prompts like those that you will use")
    add("--config", metavar="FILE", help="settings, in place of those for --hours")
    add("--evaluate", metavar="DRAFT", help="measure this draft, a file, folder or hub id, and train nothing")
    add("--dry_run", action="store_true", help="print the plan and the settings, a file for --config, and stop")
    add("--yes", action="store_true", help="start without asking")
    return parser
