"""A run of `longspec draft`. Each step continues what an earlier run has left, or finds it done."""

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from longspec.data.prompts import PromptFiles, user_turn_marks
from longspec.errors import UserError
from longspec.inference.pairs import PAIRS
from longspec.inference.registry import own_draft
from longspec.locks import locked
from longspec.models.draft_files import check_draft, draft_settings
from longspec.models.families import family_class
from longspec.pipeline.answers import CHAT, text_is_written, write_text
from longspec.pipeline.cells import check_methods
from longspec.pipeline.estimates import Estimate, Machine, Target, estimate, free_disk
from longspec.pipeline.evaluation import evaluate, evaluation_folder, missing_samples
from longspec.pipeline.files import read_jsonl, run_settings, settings_file
from longspec.pipeline.induction import layer_file, write_layer
from longspec.pipeline.probes import probe_file, write_probes
from longspec.pipeline.prompts import prompts_are_written, write_prompts
from longspec.pipeline.published import write_draft
from longspec.pipeline.report import measured, write_page
from longspec.pipeline.samples import Samples
from longspec.pipeline.settings import Settings, load_settings, settings_yaml
from longspec.pipeline.sizes import ROW, chosen_settings, evaluation_of
from longspec.pipeline.sources import check_folders
from longspec.pipeline.target import TargetText
from longspec.pipeline.training import check_trainer, is_finished, run_folder, train

HOURS, CONTEXTS, EVALUATION_HOURS = 0.5, 32768, 0.1
"""Default values of the options."""
GIB = 2**30
TIMES = "seconds.jsonl"
"""File with the seconds of each step and their estimate."""
DONE_S = 3
"""A step that takes less was done before, and says nothing about the speed."""
Done = dict[str, str]
"""What to say of each step that an earlier run has finished, by name."""
Steps = dict[str, Callable[[], object]]
"""The steps by name, in order. The names are those of the estimate."""


def draft(options: argparse.Namespace, command: str) -> None:
    """Run the command with its parsed options. command: shown in the report. Raises UserError."""
    if options.hours is not None and not 0 < options.hours < math.inf:
        raise UserError(f"--hours {options.hours}: must be a positive number")
    if options.contexts is not None and options.contexts < ROW:
        raise UserError(f"--contexts {options.contexts}: must be at least {ROW}, the tokens of a row of stage 1")
    options.target = _absolute(options.target)
    options.evaluate = options.evaluate and (own_draft(options.evaluate) or _absolute(options.evaluate))
    text = TargetText.load(options.target)
    target, machine = Target.read(options.target, text.path), Machine.here()
    root = Path(options.output_dir or _default_folder(options))
    settings = _settings(options, root, target, machine)
    if (evaluated := settings.evaluation.draft) is not None:
        check_draft(evaluated, target.config, family_class(target.config, text.path).draft_layer_class)
        check_methods(settings.evaluation, target.config.vocab_size, draft_settings(evaluated).options.window)
    if settings.chat.train or settings.chat.test:
        user_turn_marks(text.tokenizer)  # or the target cannot write conversations
    fault = _trainer_fault(settings, target, text.path, options.dry_run)
    steps, planned, done = steps_of(settings, root), estimate(settings, target, machine), finished(settings, root)
    plan = plan_lines(settings, target, machine, planned, root, done)
    if settings.text and not options.text and "prompts" not in done:
        PromptFiles(tuple(settings.text))  # checks all records, which a later step reads
    hours = options.hours or max(HOURS, settings.hours or 0)
    refusal = fault or _refusal(3600 * 2 * hours, target, machine, planned, root)
    if options.dry_run:
        print("".join(f"# {line}\n" for line in plan) + settings_yaml(settings), end="")
        if refusal:
            print(f"note: the plan is for this machine, where the run is refused: {refusal}", file=sys.stderr)
        return
    print("\n".join(plan), flush=True)
    if refusal:
        raise UserError(refusal)
    if not options.yes and not settings_file(root).exists():
        ask()
    page = root / "report.md"
    with locked(root), run_settings(root, settings_yaml(settings)):
        run_steps(steps, root, planned, done)
        if settings.evaluation.draft is None:
            write_draft(settings, root)
        write_page(page, f"A draft for {settings.target}", settings, root, command, {})
    own = settings.evaluation.draft or str(root / "draft")
    commands = [shlex.join(["longspec", name, settings.target, "--draft", own]) for name in ("chat", "serve", "bench")]
    print(f"draft: {own}", f"report: {page}", *commands, sep="\n")
    print(verdict(Samples.of_lines(measured(root))), flush=True)


def _settings(options: argparse.Namespace, root: Path, target: Target, machine: Machine) -> Settings:
    """The settings in `--config`, those of the run that the folder holds, or those chosen for target and machine."""
    texts = [_absolute(file) for file in options.text]
    own = len(PromptFiles(tuple(texts))) if texts else 0
    for override in options.overrides:
        if override.startswith("target="):
            raise UserError(f"{override}: not an override; the argument TARGET names the target")
    overrides = [f"target={options.target}", *options.overrides]
    if options.config:
        for name in ("hours", "contexts"):
            if getattr(options, name) is not None:
                raise UserError(f"--{name}: not with --config, which has all sizes; change them there or by key=value")
        settings = load_settings(options.config, overrides)
        settings.text = texts or settings.text
    elif settings_file(root).exists():
        try:
            stored = load_settings(settings_file(root))
        except UserError as error:
            raise UserError(f"{settings_file(root)}: {error}") from error
        contexts = options.contexts and min(options.contexts, max(target.positions, stored.contexts or 0))
        given = {"target": options.target, "hours": options.hours, "contexts": contexts, "text": texts or None}
        for name, value in given.items():
            if value is not None and value != (before := getattr(stored, name)):
                raise UserError(f"{root}: holds a run with {name} {before}, not {value}; choose another --output_dir")
        settings = load_settings(stored, overrides)
    else:
        hours = options.hours or (EVALUATION_HOURS if options.evaluate else HOURS)
        contexts = options.contexts or CONTEXTS
        settings = chosen_settings(target, machine, hours, contexts, texts, own, options.evaluate)
        settings = load_settings(settings, overrides)
    if not (settings.training.stages or settings.evaluation.draft or options.evaluate):
        raise UserError(
            "config key training.stages: empty, so there is no draft; name a stage, or set evaluation.draft"
        )
    if not prompts_are_written(settings, root):
        check_folders(settings)
    return evaluation_of(options.evaluate, settings) if options.evaluate else settings


def steps_of(settings: Settings, root: Path) -> Steps:
    steps: Steps = {
        CHAT: partial(write_text, [CHAT], settings, root),
        "prompts": partial(write_prompts, settings, root),
    }
    if settings.answers:
        steps["answers"] = partial(write_text, list(settings.answers), settings, root)
    if settings.training.choose_layer:
        steps["layer"] = partial(write_layer, settings, root)
    if settings.probes:
        steps["probes"] = partial(write_probes, settings, root)
    steps |= {name: partial(train, name, settings, root) for name in settings.training.stages}
    return steps | {"evaluation": partial(evaluate, settings, root)}


def run_steps(steps: Steps, root: Path, planned: Estimate, done: Done) -> None:
    """Run the steps. The time left is estimated, and corrected by the speed of the steps that this run has done."""
    spent = expected = 0.0
    names = list(steps)
    for number, (name, step) in enumerate(steps.items()):
        pace = spent / expected if expected else 1.0
        left = sum(planned.seconds[later] for later in names[number:] if later not in done) * pace
        own = done.get(name, duration(planned.seconds[name] * pace))
        rest = f"{duration(left)} left in all" if left else "nothing left"
        print(f"step {number + 1} of {len(steps)}: {name}, {own}; {rest}", flush=True)
        began = time.perf_counter()
        step()
        if (seconds := time.perf_counter() - began) > DONE_S:
            spent, expected = spent + seconds, expected + planned.seconds[name]
        if name not in done or seconds > DONE_S:
            line = {"step": name, "seconds": round(seconds, 1), "estimate": round(planned.seconds[name], 1)}
            with (root / TIMES).open("a") as times:
                times.write(json.dumps(line) + "\n")


def finished(settings: Settings, root: Path) -> Done:
    """The steps whose files are complete, with their seconds. Raises OtherSettings for samples of other settings, and
    another UserError for steps that followed from a stage that is missing."""
    _check_order(settings, root)
    has_prompts, missing = prompts_are_written(settings, root), missing_samples(settings, root)
    run = run_folder(root, settings.seed)
    complete = {
        CHAT: text_is_written([CHAT], settings, root),
        "prompts": has_prompts,
        "answers": has_prompts and text_is_written(list(settings.answers), settings, root),
        "layer": layer_file(root).exists(),
        "probes": all(probe_file(root, name).exists() for name in settings.probes),
        **{name: is_finished(run / name, stage) for name, stage in settings.training.stages.items()},
        "evaluation": has_prompts and evaluation_folder(root).exists() and not missing,
    }
    seconds = {line["step"]: line["seconds"] for line in read_jsonl(root / TIMES)}
    took = {name: seconds.get(name, 0) for name in steps_of(settings, root) if complete[name]}
    return {name: f"done in {time:,.0f} s" if time > DONE_S else "done" for name, time in took.items()}


def _check_order(settings: Settings, root: Path) -> None:
    """Raise UserError if a stage has no folder, but a later one or the evaluation, which follow from its draft, has."""
    folders = [run_folder(root, settings.seed) / name for name in settings.training.stages]
    if folders and settings.evaluation.draft is None:
        folders.append(evaluation_folder(root))
    missing = next((number for number, folder in enumerate(folders) if not folder.exists()), len(folders))
    if later := [str(folder) for folder in folders[missing:] if folder.exists()]:
        problem = f"is missing, but {', '.join(later)} followed from an earlier draft"
        raise UserError(f"{folders[missing]}: {problem}; remove that, too, or choose another --output_dir")


def duration(seconds: float) -> str:
    """Text such as "about 12 min"."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {round(seconds / 60)} min" if seconds < 5400 else f"about {seconds / 3600:,.1f} hours"


def plan_lines(
    settings: Settings, target: Target, machine: Machine, planned: Estimate, root: Path, done: Done
) -> list[str]:
    """What the run will do, for the user to confirm. All times are estimates."""
    shared = f", shared by {settings.tp_size} GPUs (training: ZeRO-3)" if settings.tp_size > 1 else ""
    lines = [
        f"target: {target.name}, {target.config.model_type}, {target.parameters / 1e9:.3g}B parameters, "
        f"{target.config.num_hidden_layers} layers, {target.positions:,} positions",
        f"machine: {machine.name}; memory of the target: {target.bytes / GIB:.3g} GiB in bf16{shared}",
        f"output: {root}, about {planned.disk / GIB:.2g} GiB",
    ]
    for name, seconds in planned.seconds.items():
        amount = f", {planned.tokens[name] / 1e6:,.3g}M tokens" if name in planned.tokens else ""
        lines.append(f"  {name}: {done.get(name, duration(seconds))}{amount}")
    left = sum(seconds for name, seconds in planned.seconds.items() if name not in done)
    return [*lines, f"{'left' if done else 'in all'}: {duration(left)} (estimated)"]


def _trainer_fault(settings: Settings, target: Target, path: str, dry_run: bool) -> str | None:
    """Check the trainer's configurations (see `check_trainer`). A dry run on a CPU also takes those that need a GPU;
    returns the reason for which a run would be refused then."""
    try:
        check_trainer(settings, target.config, path)
    except UserError as error:
        if not dry_run:
            raise
        check_trainer(settings, target.config, path, {"model.torch_dtype": "bfloat16"})  # which `auto` is on a GPU
        return str(error)
    return None


def _refusal(limit: float, target: Target, machine: Machine, planned: Estimate, root: Path) -> str | None:
    """The reason if the run would take more than `limit` seconds on a CPU, or fill the disk."""
    if not machine.gpus and planned.total > limit:
        return (
            f"{target.name}: this would take {duration(planned.total)} on {machine.name}, more than twice --hours; run "
            "it on a machine with a GPU, allow it with a larger --hours (next to --config: hours=N), or give smaller "
            "settings with --config"
        )
    if planned.disk > (free := free_disk(root)):
        return f"--output_dir {root}: needs about {planned.disk / GIB:.2g} GiB, {free / GIB:.2g} GiB are free"
    return None


def ask() -> None:
    """End the process unless the user agrees. Raises UserError without a terminal."""
    if not sys.stdin.isatty():
        raise UserError("give --yes to start without a terminal")
    try:
        agreed = input("start? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        print()
        agreed = False
    if not agreed:
        raise SystemExit(1)


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


def _absolute(name: str) -> str:
    """The absolute path of a file or folder, because the trainer runs elsewhere; other names are unchanged."""
    return str(Path(name).absolute()) if name not in PAIRS and Path(name).exists() else name


def _default_folder(options: argparse.Namespace) -> str:
    name = Path(options.target).name.removesuffix(".gguf").lower()
    return f"outputs/{name}" + (f"-evaluates-{Path(options.evaluate).name}" if options.evaluate else "")
