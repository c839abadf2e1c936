"""`make demo`: from the standard library's sources to a target, its draft and four ways to decode, with a report."""

import argparse
import json
import sys
import time
from pathlib import Path

from scripts.demo.corpus import write_corpus
from scripts.demo.evaluate import RESULTS, evaluate
from scripts.demo.figure import draw
from scripts.demo.report import summarise, table
from scripts.demo.settings import SIZES, DemoSettings
from scripts.demo.target import train_target
from scripts.pipeline.files import write_json
from scripts.pipeline.machine import CommandFailed
from scripts.pipeline.stages import CHECKPOINT, draft_weights, train_stage
from scripts.pipeline.steps import Steps


def main() -> int:
    """The exit code: 0 if the demo shows what it must, 1 if not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=("llama", "qwen2"), default="llama")
    parser.add_argument("--size", choices=SIZES, default="shown")
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"))
    options = parser.parse_args()
    start = time.perf_counter()
    try:
        failed = demo(options.output.resolve(), SIZES[options.size](options.family))
    except CommandFailed as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    print(f"{time.perf_counter() - start:.0f} s in all; {options.output}/summary.json, {options.output}/report.png")
    for sentence in failed:
        print(f"FAILED: {sentence}", file=sys.stderr)
    return 1 if failed else 0


def demo(root: Path, settings: DemoSettings) -> list[str]:
    """Run what is not done yet, and report; what the figures should show and do not."""
    steps = Steps(root)
    corpus = steps.run("corpus", settings.corpus, lambda folder: write_corpus(folder, settings.corpus))
    target = steps.run("target", settings.target, lambda folder: train_target(folder, corpus, settings.target))
    stages: list[Path] = []
    for stage in settings.stages:
        draft = draft_weights(stages[-1]) if stages else None

        def train(folder: Path, stage=stage, draft=draft) -> None:
            train_stage(folder, corpus / stage.data, target, draft, stage)

        stages.append(steps.run(f"stage{stage.number}", stage, train))

    def measure(folder: Path) -> None:
        evaluate(folder, corpus, target, stages[-1] / CHECKPOINT, settings.evaluation)

    measured = steps.run("evaluation", settings.evaluation, measure)
    results = json.loads((measured / RESULTS).read_text())
    summary = summarise(results, stages, steps.seconds, settings)
    write_json(root / "summary.json", summary)
    draw(summary, root / "report.png")
    print(f"\n{table(summary)}")
    return summary["failed"]


if __name__ == "__main__":
    sys.exit(main())
