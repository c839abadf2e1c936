"""Typed settings of `longspec draft`: derived from the target, or read from a YAML file, with key=value overrides."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from longspec.errors import UserError, first_line
from longspec.inference.methods import AUTO, DEFAULT_GAMMA, DEFAULT_SHAPE, METHODS
from longspec.models.architectures import architectures
from longspec.models.draft_layer import GLIDE

FORCED = "forced"
"""The default tree on vanilla's greedy answer, which is teacher-forced (see `forced.forced_acceptance`)."""
TASKS = ("lcc", "repobench-p", "qmsum", "gsm8k", "chat", "own", "everyday", "aime24", "edit", "quote")
OWN = "own"
"""The prompts in the user's files (`Settings.text`): a group, and a task."""
SOURCE = "source"
"""Name of the run whose text is source files as they are (`CodeSettings.train_files`)."""
GROUPS = (
    *("chat", "chat-long", "gsm8k", "gsm8k-long", "qmsum", "qmsum-short", "lcc", "lcc-short", "repobench-p"),
    *("code-question", "code-question-short", "document", "document-short", OWN),
)
"""Groups of prompts for training and validation."""
MAY_BE_0 = (".train", ".validation", ".chat.test", ".train_files", ".replay", ".contexts", ".seed")
"""Ends of the keys whose integers may be 0; those of all others are at least 1."""


@dataclass
class ChatSettings:
    """Short conversations of a user turn and an answer, both written by the target."""

    train: int = MISSING
    """Number of user turns."""
    validation: int = MISSING
    test: int = MISSING
    max_turn_tokens: int = 256
    max_new_tokens: int = 512
    batch_size: int = 512
    processes: int = 1
    """Processes per GPU. Several keep a GPU busy with short answers but must share its memory."""


@dataclass
class PromptSettings:
    train: dict[str, int] = MISSING
    """Number of prompts by group (see GROUPS)."""
    validation: dict[str, int] = MISSING
    test: int = MISSING
    """Number of prompts per task and context."""
    contexts: list[int] = MISSING
    """Shortest and longest prompt in tokens for training and validation, except in gsm8k and in short groups."""
    short_contexts: list[int] = field(default_factory=lambda: [100, 600])
    """The same in groups whose name ends in "-short"."""


@dataclass
class CodeSettings:
    """Limits on the search for source files, and how many of them are training data."""

    folders: list[str] = field(default_factory=list)
    """Folders of packages to search; empty for the standard library and the installed packages."""
    packages: int = 1000
    files_per_package: int = 60
    train_files: int = 0
    """Number of training files that stages may read as they are, by the name SOURCE; fewer if fewer are found."""


@dataclass
class AnswerSettings:
    """One run of the target, which answers the prompts of some groups."""

    prompts: list[str] = MISSING
    """Groups of prompts (see GROUPS)."""
    max_new_tokens: int = MISSING
    batch_size: int = MISSING
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.7, 1.0])
    """Temperatures of the training answers. Validation answers are greedy."""
    processes: int = 1
    """Processes per GPU."""


@dataclass
class StageSettings:
    config: str = MISSING
    """Name of the training configuration in conf/exp."""
    answers: list[str] = MISSING
    """Runs of the target whose answers are the training data: keys of `answers`, chat, or SOURCE. An epoch has a run's
    text as often as it is named."""
    replay: dict[str, int] = field(default_factory=dict)
    """Further runs, and the number of training records from each, so that the draft does not forget earlier stages."""
    steps: int = MISSING
    max_length: int = MISSING
    tokens_per_step: int = MISSING
    """Tokens per optimizer step over all ranks, a multiple of max_length."""
    micro_batch: int = 1
    """Rows of max_length tokens per rank and forward pass."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Values of the trainer's configuration by full key."""

    @property
    def last_step(self) -> int:
        return int(self.overrides.get("max_steps", self.steps))


@dataclass
class TrainingSettings:
    stages: dict[str, StageSettings] = MISSING
    evaluation_rows: int = 64
    architecture: str = GLIDE
    """See docs/own-draft.md. Only GLIDE, and for targets on one GPU, has probes and `choose_layer`."""
    architecture_options: dict[str, Any] = field(default_factory=dict)
    choose_layer: bool = False
    """Whether stage 1 reads the layer that `induction` finds, unless a probe or its overrides say which."""


@dataclass
class ProbeSettings:
    """Fresh drafts that train next to each other on stage 1's text and are compared with the first of them."""

    candidates: dict[str, dict[str, Any]] = MISSING
    """Values of the trainer's configuration by full key, by name of the candidate."""
    steps: int = 400
    rows: list[int] = field(default_factory=lambda: [128, 24])
    """Number of held-out rows of stage 1 and of stage 2."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Values that all candidates have."""
    adopt: bool = False
    """Whether stage 1 takes the values of the best candidate, without `shared`."""


@dataclass
class TaskSettings:
    contexts: list[int] = MISSING
    """Prompt lengths in tokens; 0 is the bare question."""
    max_new_tokens: int = MISSING
    prompts: int | None = None
    """Number of prompts per context for every method, in place of the methods' own numbers and `prompts.test`."""


@dataclass
class MethodSettings:
    """A method and the cells of the grid in which it is measured."""

    name: str = MISSING
    method: str = ""
    """A method of `longspec.generate`, or FORCED; empty if it equals the name."""
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    prompts: int = MISSING
    """Number of prompts per task and context; the first ones are used."""
    tree_shape: list[int] = field(default_factory=lambda: list(DEFAULT_SHAPE))
    """Nodes per level of the tree."""
    tree_nodes: int | None = None
    """Nodes of a tree that are verified, the root included; None for all."""
    lookup_branches: bool = False
    """Whether continuations found in the context join a tree."""
    gamma: int = DEFAULT_GAMMA
    drafter: str = "tree"
    """What proposes tokens with method FORCED: tree, or lookup with a chain as tree_shape."""
    tasks: list[str] = field(default_factory=list)
    """Tasks on which the method is measured; empty for all."""
    contexts: list[int] = field(default_factory=list)
    """Prompt lengths at which the method is measured; empty for all."""
    last_tokens: int | None = None
    """Number of prompt tokens that the method reads: the head and the end of the prompt; None for the whole prompt."""

    @property
    def kind(self) -> str:
        return self.method or self.name


@dataclass
class EvaluationSettings:
    tasks: dict[str, TaskSettings] = MISSING
    methods: list[MethodSettings] = MISSING
    draft: str | None = None
    """File, folder or hub id of the draft; None for the one that the settings train. Without stages there is none."""


@dataclass
class Settings:
    target: str = MISSING
    """Target as in `longspec.load_pair`: a known name, a folder, a hub id, or a GGUF file."""
    hours: float | None = None
    """Time for which the sizes were chosen; None for sizes that were written by hand."""
    contexts: int | None = None
    """Longest context for which they were chosen."""
    tp_size: int = 1
    """Number of GPUs that share the target when it writes text and in the evaluation."""
    text: list[str] = field(default_factory=list)
    """JSONL files with prompts, for the group and the task OWN."""
    benchmarks: str | None = None
    """Folder with the records of gsm8k, qmsum and aime24; None skips these tasks."""
    documents: str | None = None
    """Folder of text files, COLLECTION/NAME.txt, for the group document; None skips it."""
    seed: int = 0
    chat: ChatSettings = MISSING
    prompts: PromptSettings = MISSING
    code: CodeSettings = field(default_factory=CodeSettings)
    answers: dict[str, AnswerSettings] = field(default_factory=dict)
    training: TrainingSettings = field(default_factory=lambda: TrainingSettings({}))
    evaluation: EvaluationSettings = MISSING
    probes: dict[str, ProbeSettings] = field(default_factory=dict)
    int8: bool = False
    """Whether the draft is stored in 8 bits, which only this project reads."""
    experiment: dict[str, Any] = field(default_factory=dict)
    """Settings of other programs that build on this file; ignored."""


def load_settings(base: str | Path | Settings, overrides: Sequence[str] = ()) -> Settings:
    """The settings in a YAML file or `base` itself, after `key=value` overrides. Raises UserError with the key.

    The value of a section, such as `chat`, is merged with it; every other value, maps included, is replaced.
    """
    if not isinstance(base, Settings) and not Path(base).is_file():
        raise UserError(f"--config: {base}: no such file; `longspec draft TARGET --dry_run` prints one")
    source = where = "settings" if isinstance(base, Settings) else str(base)
    try:
        part = OmegaConf.structured(base) if isinstance(base, Settings) else OmegaConf.load(base)
        merged = OmegaConf.merge(OmegaConf.structured(Settings), part)
        for where in overrides:
            name, sign, _ = where.partition("=")
            if not sign:
                raise ValueError("not an override; write key=value")
            if OmegaConf.get_type(OmegaConf.select(merged, name)) is dict:  # not a section, whose keys are fixed
                OmegaConf.update(merged, name, {}, merge=False)
            merged = OmegaConf.merge(merged, OmegaConf.from_dotlist([where]))
        where = source
        settings: Any = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, YAMLError, ValueError, RecursionError) as error:
        # The first line of YAML's messages tells neither the problem nor its line. An alias within itself recurses.
        reason = " ".join(str(error).split()) if isinstance(error, YAMLError) else first_line(error)
        place = f"key {key}: " if (key := getattr(error, "full_key", None)) else ""
        raise UserError(f"{where}: {place}{reason}") from error
    if settings.training.architecture != GLIDE or settings.tp_size > 1:
        settings.probes, settings.training.choose_layer = {}, False
    check_settings(settings)
    return settings


def settings_yaml(settings: Settings) -> str:
    """The settings as a file for `load_settings`."""
    return OmegaConf.to_yaml(OmegaConf.structured(settings))


def check_integers(value: Any, key: str, least: int = 1) -> None:
    """Raise UserError for an integer below its least value, in a section or a field with its key after a period."""
    if is_dataclass(value):
        for entry in fields(value):
            if "typing.Any" not in str(entry.type):  # else values of the trainer, which checks them
                own = f"{key}.{entry.name}"
                check_integers(getattr(value, entry.name), own, int(not own.endswith(MAY_BE_0)))
    elif isinstance(value, (dict, list)):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            check_integers(item, f"{key}.{name}", least)
    elif isinstance(value, int) and not isinstance(value, bool) and value < least:
        raise UserError(f"config key {key[1:]}: {value}; must be at least {least}")


def check_settings(settings: Settings) -> None:
    """Raise UserError that names the first key with a wrong value."""
    check_integers(settings, "")
    prompts, evaluation, stages = settings.prompts, settings.evaluation, settings.training.stages
    reserved = {"chat": "the section chat", SOURCE: "code.train_files"}
    runs = [*reserved, *settings.answers]
    choices: list[tuple[str, Iterable[str], Collection[str]]] = [
        ("prompts.train", prompts.train, GROUPS),
        ("prompts.validation", prompts.validation, GROUPS),
        *((f"answers.{name}.prompts", run.prompts, GROUPS) for name, run in settings.answers.items()),
        *((f"training.stages.{name}.answers", stage.answers, runs) for name, stage in stages.items()),
        *((f"training.stages.{name}.replay", stage.replay, runs) for name, stage in stages.items()),
        ("training.architecture", [settings.training.architecture], architectures()),
        ("evaluation.tasks", evaluation.tasks, TASKS),
        ("evaluation.methods", [method.kind for method in evaluation.methods], (*METHODS, AUTO, FORCED)),
        *((f"evaluation.methods, {one.name}.drafter", [one.drafter], ("tree", "lookup")) for one in evaluation.methods),
        *((f"evaluation.methods, {one.name}.tasks", one.tasks, evaluation.tasks) for one in evaluation.methods),
    ]
    for key, names, allowed in choices:
        for name in names:
            if name not in allowed:
                raise UserError(f"config key {key}: no {name}; use {', '.join(allowed)}")
    if settings.training.architecture == GLIDE and settings.training.architecture_options:
        raise UserError("config key training.architecture_options: not for glide; give training.architecture, too")
    for name in reserved.keys() & settings.answers:
        raise UserError(f"config key answers.{name}: this name is reserved for {reserved[name]}")
    held_out = {"chat": settings.chat.validation, SOURCE: 0}
    for name, run in settings.answers.items():
        held_out[name] = sum(prompts.validation.get(group, 0) for group in run.prompts)
    for name, stage in stages.items():
        if not any(held_out[run] for run in stage.answers):
            text = f"[{', '.join(stage.answers)}] has no held-out text; add a run with validation"
            raise UserError(f"config key training.stages.{name}.answers: {text}")
    for name, probe in settings.probes.items():
        if not (stages and probe.candidates and len(probe.rows) >= min(2, len(stages))):
            raise UserError(f"config key probes.{name}: needs candidates, a stage, and rows of stages 1 and 2")
    for key, contexts in (("contexts", prompts.contexts), ("short_contexts", prompts.short_contexts)):
        if len(contexts) != 2 or not 0 < contexts[0] <= contexts[1]:
            raise UserError(f"config key prompts.{key}: must be [shortest, longest]")
