"""One page about a run, written from what its folders hold: summary.json, pictures, and README.md around them.

`python -m scripts.reproduce.report outputs/reproduce-PRESET/FAMILY` writes it into docs/results/PRESET-FAMILY.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longspec.errors import UserError, reports_user_errors
from longspec.train.logging import METRICS_NAME
from scripts.pipeline.files import write_json
from scripts.reproduce.ablations import RESULTS, losses_of, read_evaluation
from scripts.reproduce.cells import CELLS, read_cells
from scripts.reproduce.claims import Evidence, Verdict, claims, marks
from scripts.reproduce.evaluate import NO_TIME
from scripts.reproduce.figures import draw_report
from scripts.reproduce.run import STAGES, Run
from scripts.reproduce.summary import samples_of, shown

SUMMARY, PAGE = "summary.json", "README.md"
IN_SHORT = ("name", "temperature", "all")
ANSWERS = {True: "yes", False: "**no**", None: "–"}


def report(folder: Path, run: Run) -> None:
    """Write the run's page, summary and pictures into `folder`, from its evaluation and what ablations there are."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = collect(run)
    write_json(folder / SUMMARY, summary)
    pictures = draw_report(folder, summary)
    (folder / PAGE).write_text(page(summary, pictures), encoding="utf-8")
    print("\n".join([*table(marks_of(summary)), "", f"{folder}/{PAGE}, {SUMMARY} and {len(pictures)} pictures"]))


@reports_user_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run, outputs/reproduce-PRESET/FAMILY")
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    root = options.run.resolve()
    run = Run(root, root.name, root.parent.name.removeprefix("reproduce-"))
    if not (root / "evaluation" / CELLS).is_file():
        raise UserError(f"{options.run}: no evaluation/{CELLS} there; give the folder of a run that has been evaluated")
    report(options.results / f"{run.preset}-{run.family}", run)


def collect(run: Run) -> dict[str, Any]:
    """Everything that the page says, from the folders of a run."""
    place = run.root / "evaluation"
    read = read_evaluation(place)
    ablations = {
        path.parent.name: json.loads(path.read_text()) for path in sorted(run.root.glob(f"ablations/*/{RESULTS}"))
    }
    lines = read_cells(place / CELLS)
    found = Evidence(samples_of(lines), read["facts"], read["forced"], read["rounds"], ablations)
    training = run.target / "training.json"
    variant = read["facts"]["settings"]["variant"]
    logs = {f"stage {n}": run.draft(variant, n).parent / METRICS_NAME for n in STAGES}
    losses = {name: losses_of(log) for name, log in logs.items()}
    losses |= {f"{name}, held out": losses_of(log, "eval_loss") for name, log in logs.items()}
    return {
        "preset": run.preset,
        "family": run.family,
        "marks": [asdict(row) for row in marks(found)],
        "claims": [asdict(row) for row in claims(found)],
        "failed": [
            {"name": line["name"], "context": line["context"], "reason": line["failed"]}
            for line in lines
            if line.get("failed")
        ],
        **read,
        "ablations": {name: in_short(ablation) for name, ablation in ablations.items()},
        "target_training": json.loads(training.read_text()) if training.is_file() else [],
        "draft_losses": {name: curve for name, curve in losses.items() if curve},
    }


def in_short(ablation: dict[str, Any]) -> dict[str, Any]:
    """An ablation's results, of each method of an arm the pooled figures alone."""
    if "arms" not in ablation:
        return ablation
    arms = {
        arm: result | {"methods": [{field: row[field] for field in IN_SHORT} for row in result["methods"]]}
        for arm, result in ablation["arms"].items()
    }
    return ablation | {"arms": arms}


def page(summary: dict[str, Any], pictures: dict[str, str]) -> str:
    """README.md: nothing in it but what `summary` holds."""
    facts = summary["facts"]
    settings, versions = facts["settings"], facts["versions"]
    size = f"{facts['parameters'] / 1e6:.0f}M parameters in {facts['layers']} layers"
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    lines = [
        f"# The paper's claims on a {summary['family']} target from scratch ({summary['preset']})",
        "",
        f"Written by `scripts/reproduce.sh --preset {summary['preset']} --family {summary['family']}` from the "
        f"measurements in [{SUMMARY}]({SUMMARY}).",
        f"Target: {size}; draft: {facts['draft_parameters'] / 1e6:.1f}M, variant {settings['variant']}, after stage "
        f"{settings['stage']}. {facts['device']}, {facts['dtype']}, batch 1, {settings['new_tokens']} new tokens a "
        f"prompt; {packages}. The evaluation took {facts['seconds']:.0f} s.",
        *training_line(summary["target_training"]),
        "",
        "An output *loops* where fewer than half of its 4-grams are distinct. Figures are pooled over verification "
        "passes or seconds; ± is the standard error of a bootstrap over samples (of a ratio of speeds: over the "
        "prompts that both have), and seeds give the range of their own figures. What the last pass of an output "
        "accepted past its limit is not counted, so acceptance lengths are a little too low, the more the longer they "
        "are. A dash is what was not measured, or what the measurement does not decide. The next two tables are of "
        "outputs that do not loop, but for the time of a round, acceptance at T = 1 beside its expectation, and "
        "losslessness.",
        "",
        "## To reach",
        "",
        *table(marks_of(summary)),
        "",
        "## The paper's claims",
        "",
        *table([Verdict(**row) for row in summary["claims"]], ("claim", "the paper", "here", "holds", "rule")),
        "",
        "## Methods",
        "",
        *method_table(summary["methods"]),
        "",
        *forced_lines(summary["forced"]),
        *missing_lines(summary),
        *ablation_lines(summary["ablations"]),
    ]
    for name, title in pictures.items():
        lines += [f"![{title}]({name})", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def training_line(training: Sequence[dict[str, Any]]) -> list[str]:
    """How the target was trained, as far as its log tells."""
    held_out = [line["held_out_loss"] for line in training if line.get("held_out_loss") is not None]
    if not held_out:
        return []
    last = training[-1]
    return [
        f"The target read {last['tokens'] / 1e6:.0f}M tokens in {last['seconds']:.0f} s, to a held-out loss of "
        f"{held_out[-1]:.2f} nats a token."
    ]


def marks_of(summary: dict[str, Any]) -> list[Verdict]:
    return [Verdict(**row) for row in summary["marks"]]


def table(
    rows: Sequence[Verdict], head: tuple[str, ...] = ("figure", "wanted", "measured", "reached", "over what")
) -> list[str]:
    """Markdown, a verdict a line."""
    cells = [(row.claim, row.wanted, row.measured, ANSWERS[row.holds], row.rule) for row in rows]
    return markdown(head, cells)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def method_table(methods: Sequence[dict[str, Any]]) -> list[str]:
    head = [
        *("method", "T", "outputs", "acceptance length", "of outputs without loops", "code", "others", "that loop"),
        *("tokens/s", "without loops", "× vanilla", "without loops"),
        *("outputs that loop", "distinct 4-grams", "outputs unlike vanilla's"),
    ]
    return markdown(head, [method_row(row) for row in methods])


def method_row(row: dict[str, Any]) -> list[str]:
    figures, same = row["all"], row["same_as_vanilla"]
    distinct = figures["distinct_4grams"]
    return [
        row["name"],
        f"{row['temperature']:g}",
        str(figures["samples"]),
        shown(figures["acceptance_length"]),
        shown(figures["acceptance_length_without_loops"]),
        *(shown(group and group["acceptance_length_without_loops"]) for group in row["by_kind"].values()),
        shown(figures["acceptance_length_of_loops"]),
        *(rate(figures[name]) for name in ("tokens_per_second", "tokens_per_second_without_loops")),
        *(shown(figures[name]) for name in ("speed_up_over_vanilla", "speed_up_over_vanilla_without_loops")),
        str(figures["loops"]),
        "–" if distinct is None else f"{distinct:.0%}",
        "–" if same is None else f"{same['different']} of {same['outputs']}",
    ]


def rate(figure: dict[str, Any] | None) -> str:
    """Tokens/s."""
    return "–" if figure is None else f"{figure['value']:.1f}"


def forced_lines(forced: dict[str, Any]) -> list[str]:
    """Teacher-forced acceptance, by context."""
    held_out, sampled = (forced.get(name, {}) for name in ("held_out", "sampled"))
    rows = [
        [
            context,
            *(
                f"{row[figure]:.2f}" if row else "–"
                for row in (held_out[context], sampled.get(context))
                for figure in ("acceptance_length", "expected_length")
            ),
        ]
        for context in held_out
    ]
    if not rows:
        return []
    head = ("context", "held-out text", "1 + Σ p there", "the target's own text at T = 1", "1 + Σ p there")
    return [
        "The tree (4 16 16 16 16), teacher-forced: tokens a round on real held-out text and on what the target itself "
        "emitted, beside what the target's probabilities over the tree's paths add up to.",
        "",
        *markdown(head, rows),
        "",
    ]


def missing_lines(summary: dict[str, Any]) -> list[str]:
    """What failed, what had no file and what the time did not reach."""
    facts, lines = summary["facts"], []
    for row in summary["failed"]:
        lines.append(f"- {row['name']} at {row['context']} tokens failed: {row['reason']}")
    if facts["absent"]:
        lines.append(f"- No prompts for {', '.join(facts['absent'])}.")
    late = [row for row in facts["left_out"] if row["reason"] == NO_TIME]
    if late:
        names = sorted({row["name"] for row in late})
        lines.append(f"- Cut short or left out for want of time: {len(late)} cells of {', '.join(names)}.")
    return ["Not measured:", "", *lines, ""] if lines else []


def ablation_lines(ablations: dict[str, Any]) -> list[str]:
    """Acceptance of the tree by arm."""
    lengths = ("acceptance_length", "acceptance_length_without_loops")
    rows = [
        [
            name,
            arm,
            "–" if (loss := result.get("target_loss")) is None else f"{loss:.2f}",
            str(result["losses"][-1][0]) if result.get("losses") else "–",
            f"{method['temperature']:g}",
            *(shown(method["all"][figure]) for figure in lengths),
            rate(method["all"]["tokens_per_second_without_loops"]),
            shown(method["all"]["speed_up_over_vanilla"]),
            f"{method['all']['loops']} of {method['all']['samples']}",
        ]
        for name, found in ablations.items()
        for arm, result in found.get("arms", {}).items()
        for method in result["methods"]
        if method["name"] != "vanilla"
    ]
    if not rows:
        return []
    head = (
        *("ablation", "arm", "target's held-out loss", "steps of the last stage"),
        *("T", "acceptance length", "of outputs without loops"),
        *("tokens/s without loops", "× vanilla", "outputs that loop"),
    )
    return ["## Ablations", "", *markdown(head, rows), ""]


if __name__ == "__main__":
    main()
