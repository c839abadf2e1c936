"""Typed settings of an experiment, read from a YAML file and key=value overrides."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from longspec.errors import UserError, first_line
from longspec.inference.methods import AUTO, METHODS, TREE_RULES

FORCED = "forced"
"""The default tree on vanilla's greedy answer, which is teacher-forced (see `diagnostics.forced_acceptance`)."""
TASKS = ("lcc", "repobench-p", "qmsum", "gsm8k", "chat", "everyday", "aime24", "edit", "quote")
HEAD_TOKENS = 48
"""First tokens of a prompt that are kept when it is shortened; they hold the head of the chat format."""
GROUPS = (
    *("chat", "chat-long", "gsm8k", "gsm8k-long", "qmsum", "qmsum-short", "lcc", "lcc-short", "repobench-p"),
    *("code-question", "code-question-short", "document", "document-short"),
)
"""Groups of prompts for training and validation."""
CONTEXTS = "longest over shortest context"
FIGURES = ("tokens per round", "tokens/s", "tokens/s over vanilla", "tokens/s over lookup", CONTEXTS)
"""Figures that may have goals. CONTEXTS compares the tree's tokens per round."""
EVERY = "every"
"""Key in an ablation arm for changes that apply to all stages."""
RECIPE = "recipe"
"""Name of the arm without changes."""
SHORT = "short"
"""Name of the arm with fewer steps, which the other arms change if it exists."""


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
    """Limits on the search for source files."""

    folders: list[str] = field(default_factory=list)
    """Folders of packages to search; empty for the standard library and the installed packages."""
    packages: int = 1000
    files_per_package: int = 60
    entries_per_package: int = 3000
    """Maximum number of directory entries read per package."""


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
    """Runs of the target whose answers are the training data: keys of `answers`, or chat."""
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


@dataclass
class TrainingSettings:
    stages: dict[str, StageSettings] = MISSING
    seeds: list[int] = MISSING
    """Seeds of the recipe. Ablation arms use the first one."""
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Ablation arms by name. An arm maps a stage, or EVERY, to its changes; null skips the stage."""
    only: list[str] = field(default_factory=list)
    """Arms to train, RECIPE included; empty for all."""
    evaluation_rows: int = 64


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
    seeds: int = 1
    tree_shape: list[int] = field(default_factory=lambda: [4, 16, 16, 16, 16])
    """Nodes per level of the tree."""
    tree_nodes: int | None = None
    """Nodes of a tree that are verified, the root included; None for all."""
    lookup_branches: bool = False
    """Whether continuations found in the context join a tree."""
    tree_rule: str = "reject"
    gamma: int = 4
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
    """Folder of the draft; None for the last stage of the recipe with the first seed."""
    diagnostic_rows: int = 8
    """Validation answers per run of the target that the step `diagnose` reads; 0 for none."""


@dataclass
class Goal:
    """The least value that a figure of the evaluation should have, on outputs without loops."""

    figure: str = MISSING
    """One of FIGURES."""
    least: float = MISSING
    method: str = "tree"
    """Name of a method in evaluation.methods. Without samples, a goal is not measured."""
    temperature: float = 0.0
    tasks: list[str] = field(default_factory=list)
    """Tasks whose samples are pooled; empty for all."""
    contexts: list[int] = field(default_factory=list)
    """Prompt lengths whose samples are pooled; empty for all."""
    each: list[str] = field(default_factory=list)
    """Columns, task or context: every combination of their values should have the least value; empty pools all."""


@dataclass
class Settings:
    target: str = MISSING
    """Target as in `longspec.load_pair`: a known name, a folder, or a GGUF file."""
    root: str = MISSING
    """Folder for all output except the report."""
    report: str = MISSING
    """Folder of the report."""
    text: str | None = None
    """Folder with the records of gsm8k, qmsum and aime24; None skips these tasks."""
    documents: str | None = None
    """Folder of text files, COLLECTION/NAME.txt, for the group document; None skips it."""
    seed: int = 0
    chat: ChatSettings = MISSING
    prompts: PromptSettings = MISSING
    code: CodeSettings = field(default_factory=CodeSettings)
    answers: dict[str, AnswerSettings] = MISSING
    training: TrainingSettings = MISSING
    evaluation: EvaluationSettings = MISSING
    probes: dict[str, ProbeSettings] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)


def load_settings(file: str | Path, overrides: Sequence[str] = ()) -> Settings:
    """The settings in a YAML file after `key=value` overrides. Raises UserError that names the invalid key."""
    if not Path(file).is_file():
        raise UserError(f"--config: {file}: no such file; use experiments/smollm2.yaml or a copy of it")
    merged = OmegaConf.structured(Settings)
    try:
        for part in (OmegaConf.load(file), OmegaConf.from_dotlist(list(overrides))):
            merged = OmegaConf.merge(merged, part)
        settings: Any = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        key = getattr(error, "full_key", None)
        raise UserError(f"{file}: {f'key {key}: ' if key else ''}{first_line(error)}") from error
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    for split in ("train", "validation"):
        for group, count in getattr(settings.prompts, split).items():
            _require(group in GROUPS, f"prompts.{split}.{group}", f"no such group; use {', '.join(GROUPS)}")
            _require(count >= 0, f"prompts.{split}.{group}", "must not be negative")

    for key in ("contexts", "short_contexts"):
        contexts = getattr(settings.prompts, key)
        valid = len(contexts) == 2 and 0 < contexts[0] <= contexts[1]
        _require(valid, f"prompts.{key}", "must be [shortest, longest]")
    for name, answers in settings.answers.items():
        _require(name != "chat", "answers.chat", "this name is reserved for the section chat")
        unknown = set(answers.prompts) - set(GROUPS)
        _require(not unknown, f"answers.{name}.prompts", f"no such group: {', '.join(sorted(unknown))}")

    for name, stage in settings.training.stages.items():
        _require(name != EVERY, f"training.stages.{EVERY}", "this name is reserved for all stages of an arm")
        check_data(settings, stage, f"training.stages.{name}")
    _require(bool(settings.training.seeds), "training.seeds", "needs at least one seed")
    unknown = set(settings.training.only) - {RECIPE, *settings.training.arms}
    _require(not unknown, "training.only", f"no such arm: {', '.join(sorted(unknown))}")
    _require(
        RECIPE not in settings.training.arms,
        f"training.arms.{RECIPE}",
        "this name is reserved for the unchanged recipe",
    )

    for number, goal in enumerate(settings.goals):
        key = f"goals[{number}]"
        _require(goal.figure in FIGURES, key, f"no figure {goal.figure}; use {', '.join(FIGURES)}")
        unknown = set(goal.tasks) - set(TASKS)
        _require(not unknown, key, f"no task {', '.join(sorted(unknown))}; use {', '.join(TASKS)}")
        _require(set(goal.each) <= {"task", "context"}, f"{key}.each", "must contain task and context only")

    for task in settings.evaluation.tasks:
        _require(task in TASKS, f"evaluation.tasks.{task}", f"no such task; use {', '.join(TASKS)}")
    for number, method in enumerate(settings.evaluation.methods):
        key = f"evaluation.methods[{number}]"
        kinds, rule = (*METHODS, AUTO, FORCED), method.tree_rule
        _require(method.kind in kinds, key, f"no method {method.kind}; use one of {', '.join(kinds)}")
        _require(rule in TREE_RULES, key, f"no tree_rule {rule}; use one of {', '.join(TREE_RULES)}")
        enough = method.prompts <= settings.prompts.test
        _require(enough, f"{key}.prompts", f"must be at most prompts.test ({settings.prompts.test})")
        unknown = set(method.tasks) - set(settings.evaluation.tasks)
        _require(not unknown, key, f"no task {', '.join(sorted(unknown))} in evaluation.tasks")
        short = method.last_tokens is not None and method.last_tokens <= HEAD_TOKENS
        _require(not short, f"{key}.last_tokens", f"must be more than the head's {HEAD_TOKENS}")
        answered = method.kind != FORCED or any(_answers(one, method) for one in settings.evaluation.methods[:number])
        _require(answered, key, "method forced needs the greedy answers of a method vanilla before it in the list")


def _answers(vanilla: MethodSettings, forced: MethodSettings) -> bool:
    """Whether a method writes the answers that method FORCED needs."""
    inside = [
        not outer or (bool(inner) and set(inner) <= set(outer))
        for inner, outer in ((forced.tasks, vanilla.tasks), (forced.contexts, vanilla.contexts))
    ]
    greedy = vanilla.name == "vanilla" and 0.0 in vanilla.temperatures and forced.temperatures == [0.0]
    return greedy and all(inside) and vanilla.prompts >= forced.prompts


def check_data(settings: Settings, stage: StageSettings, key: str) -> None:
    """Raise UserError if a stage names an unknown run of the target or a negative count. key: the stage's."""
    runs = ["chat", *settings.answers]
    for part, names in (("answers", stage.answers), ("replay", stage.replay)):
        for name in names:
            _require(name in runs, f"{key}.{part}", f"no run {name} of the target; use {', '.join(runs)}")
    for name, count in stage.replay.items():
        _require(count >= 0, f"{key}.replay.{name}", "must not be negative")


def _require(condition: bool, key: str, problem: str) -> None:
    if not condition:
        raise UserError(f"config key {key}: {problem}")
