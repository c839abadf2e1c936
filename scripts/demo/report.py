"""The demo's figures: a table, `summary.json`, and whether they are what they must be."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from longspec.train.logging import METRICS_NAME
from scripts.demo.evaluate import METHODS, UNTRAINED
from scripts.demo.settings import DemoSettings, Required
from scripts.pipeline.files import read_jsonl


def summarise(
    results: dict[str, Any], stages: list[Path], seconds: dict[str, float], settings: DemoSettings
) -> dict[str, Any]:
    """All that `summary.json` holds."""
    vanilla = results["runs"]["vanilla"]
    methods = {}
    for name, found in results["runs"].items():
        figures = found["summary"]
        methods[name] = {
            "acceptance_length": figures["mean_acceptance_length"],
            "tokens_per_second": figures["tokens_per_second"],
            "ttft_s": figures["ttft_s"],
            "rounds": figures["rounds"],
            "accepted_by_depth": figures["accepted_by_depth"],
            "same_tokens_as_vanilla": found["token_ids"] == vanilla["token_ids"],
        }
    prompts = vanilla["summary"]
    summary: dict[str, Any] = {
        "family": settings.target.family,
        "prompts": prompts["samples"],
        "new_tokens": prompts["new_tokens"],
        "device": prompts["device"],
        "versions": prompts["versions"],
        "methods": methods,
        "distinct_4grams": vanilla["distinct_4grams"],
        **results["text"],
        "stages": [read_jsonl(stage / METRICS_NAME) for stage in stages],
        "seconds": seconds,
        "settings": asdict(settings),
    }
    summary["failed"] = failures(summary, settings.required)
    return summary


def failures(summary: dict[str, Any], required: Required) -> list[str]:
    """One sentence for each requirement that is not met."""
    methods = summary["methods"]
    tree, seq, untrained = (methods[name]["acceptance_length"] for name in ("tree", "seq", UNTRAINED))
    found = [
        f"{name} emits other tokens than vanilla" for name in methods if not methods[name]["same_tokens_as_vanilla"]
    ]
    if tree < required.tree_acceptance:
        found.append(f"tree accepts {tree:.2f} tokens a round, not {required.tree_acceptance:.2f}")
    if tree - seq <= required.tree_over_seq:
        found.append(f"tree accepts {tree:.2f} tokens a round, which is not more than seq's {seq:.2f}")
    if tree - untrained < required.tree_over_untrained:
        found.append(f"tree accepts {tree:.2f} tokens a round and {untrained:.2f} with an untrained draft: too near")
    target, bigram = summary["target_bits_per_byte"], summary["bigram_bits_per_byte"]
    if bigram - target < required.bigram_over_target:
        found.append(f"the target needs {target:.2f} bits per byte, not clearly fewer than a bigram's {bigram:.2f}")
    return found


def table(summary: dict[str, Any]) -> str:
    """The methods, one a line, and below them what puts their figures in place."""
    lines = [f"{'method':<22}{'acceptance length':>18}{'tokens/s':>11}   same tokens as vanilla?"]
    names = {**{method: method for method in METHODS}, UNTRAINED: "tree, untrained draft"}
    for method, name in names.items():
        figures = summary["methods"][method]
        same = "yes" if figures["same_tokens_as_vanilla"] else "NO"
        accepted, speed = figures["acceptance_length"], figures["tokens_per_second"]
        lines.append(f"{name:<22}{accepted:>18.2f}{speed:>11.1f}   {same}")
    lines += [
        "",
        "magicdec's window holds these prompts whole, so there the target drafts for itself. On a CPU a target this",
        "small costs hardly more than its draft, and 69 nodes cost much more than one token.",
        "",
        f"tree on real held-out text, teacher-forced: {summary['teacher_forced_acceptance']:.2f} tokens a round",
        f"held-out text: target {summary['target_bits_per_byte']:.2f} bits per byte, "
        f"bigram {summary['bigram_bits_per_byte']:.2f}",
        f"distinct 4-grams in the outputs: {100 * summary['distinct_4grams']:.0f}%",
        f"{summary['prompts']} held-out prompts, {summary['new_tokens']} new tokens, greedy, fp32, {summary['device']}",
        "time: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["seconds"].items()),
    ]
    return "\n".join(lines)
