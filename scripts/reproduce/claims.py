"""The paper's claims and this project's own marks, each beside what was measured, with the rule that judges it.

A rule looks at pooled figures, unless it says more; the spread stands beside them. What was not measured is neither
held nor refuted.
"""

from dataclasses import dataclass
from math import hypot
from typing import Any

from scripts.reproduce.baselines import UNASSISTED
from scripts.reproduce.pair import CODE_TASKS
from scripts.reproduce.summary import (
    Sample,
    acceptance,
    chosen,
    paired,
    pooled,
    round_ms,
    sameness,
    shown,
    speed_up,
    speed_up_by_cell,
    without_loops,
)

PAPER_BY_TASK = {
    "lcc": ((3.28, 4.21), (1.57, 2.65)),
    "repobench-p": ((3.39, 4.46), (1.69, 3.26)),
    "qmsum": ((2.76, 3.15), (1.48, 2.37)),
}
"""(least, largest) acceptance length and speed-up over the five targets of the paper, T = 0."""
LEAST_OF_SHORTEST = 0.95
"""What acceptance at the longest context must keep of that at the shortest."""
ROUND_TIME_MARGIN = 1.05
LONGEST = 2
"""Contexts, the longest ones, at which speed is judged."""


@dataclass(frozen=True)
class Verdict:
    """A line of a table. holds: None where it was not measured, or where the measurement does not decide."""

    claim: str
    wanted: str
    measured: str
    rule: str
    holds: bool | None


@dataclass(frozen=True)
class Evidence:
    """Everything that a report is made of, as it lies in a run's folders."""

    samples: list[Sample]
    facts: dict[str, Any]
    forced: dict[str, Any]
    rounds: dict[str, Any]
    ablations: dict[str, Any]
    """By name, see `ablations.evaluate_arms`."""

    def of(self, name: str, temperature: float = 0.0, **more: Any) -> list[Sample]:
        return chosen(self.samples, name=name, temperature=temperature, **more)

    def straight(self, name: str, temperature: float = 0.0, **more: Any) -> list[Sample]:
        """Without the outputs that loop."""
        return without_loops(self.of(name, temperature, **more))

    @property
    def contexts(self) -> list[int]:
        return sorted({sample["context"] for sample in self.samples})

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(sample["task"] for sample in self.samples))


def claims(found: Evidence) -> list[Verdict]:
    """The paper's."""
    return [
        *(row for task in found.tasks if task in PAPER_BY_TASK for row in _by_task(found, task)),
        _over_length(found, "Acceptance hardly falls with the context", "4.01 at 0–5k, 3.97 at 25–32k (99%)"),
        _sooner(found),
        _noisy_training(found),
        _hybrid(found),
        *_peers(found),
        _sampling(found),
        _lossless(found),
    ]


def marks(found: Evidence) -> list[Verdict]:
    """What this project set itself to reach, on outputs that do not loop."""
    code = [task for task in found.tasks if task in CODE_TASKS]
    other = [task for task in found.tasks if task not in CODE_TASKS]
    tree = "tree-auto" if found.of("tree-auto") else "tree"
    return [
        _at_least("Acceptance length of tree, code", pooled(found.straight("tree", task=code), acceptance), 4.0),
        _at_least("Acceptance length of tree, others", pooled(found.straight("tree", task=other), acceptance), 3.2),
        _over_length(found, "Acceptance at the longest context", f"at least {LEAST_OF_SHORTEST:.0%} of the shortest's"),
        _ratio_at_least(f"Tokens/s of {tree} over vanilla, longest contexts", found, tree, "vanilla", 1.9),
        *(
            _ratio_at_least(f"Tokens/s of {name} over lookup, T = {t:g}, {of}", found, name, "lookup", least, tasks, t)
            for name, t in ((tree, 0.0), ("tree", 1.0))
            for of, least, tasks in (("code", 1.3, code), ("others", 1.8, other))
        ),
        _over_best(f"Tokens/s of {tree} over transformers' best unassisted generate", found, tree),
        *(_round_time(found, name) for name in ("tree", "tree-descend")),
        *_reach_of_descend(found),
    ]


def _by_task(found: Evidence, task: str) -> list[Verdict]:
    (least, most), (slowest, fastest) = PAPER_BY_TASK[task]
    tree = found.straight("tree", task=task)
    length = pooled(tree, acceptance)
    ratio = speed_up(tree, found.of("vanilla", task=task))
    lengths, speeds = f"{least:.2f} … {most:.2f}", f"{slowest:.2f} … {fastest:.2f} ×"
    rule = "at least the least of the paper's five targets"
    return [
        Verdict(f"Acceptance length, {task}", lengths, shown(length), rule, _reaches(length, least)),
        Verdict(f"Speed-up over vanilla, {task}", speeds, _times(ratio), rule, _reaches(ratio, slowest)),
    ]


def _over_length(found: Evidence, claim: str, wanted: str) -> Verdict:
    rule = f"tree at the longest context at least {LEAST_OF_SHORTEST:.0%} of that at the shortest, same tasks"
    if len(found.contexts) < 2:
        return Verdict(claim, wanted, "–", rule, None)
    short, long = (found.straight("tree", context=found.contexts[at]) for at in (0, -1))
    common = {sample["task"] for sample in short} & {sample["task"] for sample in long}
    first, last = (pooled(chosen(samples, task=common), acceptance) for samples in (short, long))
    if first is None or last is None:
        return Verdict(claim, wanted, "–", rule, None)
    share = last["value"] / first["value"]
    told = f"{share:.0%}"
    if first["error"] is not None and last["error"] is not None:
        told += f" ± {share * hypot(first['error'] / first['value'], last['error'] / last['value']):.0%}"
    measured = f"{shown(first)} at {found.contexts[0]}, {shown(last)} at {found.contexts[-1]} ({told})"
    return Verdict(claim, wanted, measured, rule, share >= LEAST_OF_SHORTEST)


def _sooner(found: Evidence) -> Verdict:
    factor = found.ablations.get("anchor_offset", {}).get("sooner")
    return Verdict(
        "Anchor-offset positions reach the same loss sooner",
        "3.9 × sooner",
        "–" if factor is None else f"{factor:.2f} × sooner",
        "steps of the arm without them over the steps after which the arm with them has that loss: more than 1",
        None if factor is None else factor > 1,
    )


def _noisy_training(found: Evidence) -> Verdict:
    arms = found.ablations.get("slicing", {}).get("arms", {})
    slicing, block = (_arm_acceptance(arms, name) for name in ("slicing", "block"))
    rule = "acceptance length with slicing above that with block attention, T = 0; undecided within 2 standard errors"
    claim, wanted = "Flash noisy training lengthens acceptance", "+14.7%"
    if slicing is None or block is None:
        return Verdict(claim, wanted, "–", rule, None)
    gain = slicing["value"] - block["value"]
    measured = f"{gain / block['value']:+.1%} ({shown(block)} → {shown(slicing)})"
    known = slicing["error"] is not None and block["error"] is not None
    decided = known and abs(gain) >= 2 * hypot(slicing["error"], block["error"])
    return Verdict(claim, wanted, measured, rule, gain > 0 if decided else None)


def _arm_acceptance(arms: dict[str, Any], name: str) -> dict[str, Any] | None:
    rows = [row for row in arms.get(name, {}).get("methods", ()) if (row["name"], row["temperature"]) == ("tree", 0.0)]
    return rows[0]["all"]["acceptance_length_without_loops"] if rows else None


def _hybrid(found: Evidence) -> Verdict:
    rows = [row for row in found.rounds.get("attention", ()) if row["hybrid_ms"] is not None]
    rule = "attention of a verification at the longest context, all layers: hybrid below one call under a dense mask"
    claim, wanted = "Hybrid tree attention cuts the attention part of a round", "49.9 → 12.5 ms (4.0 ×)"
    if not rows:
        return Verdict(claim, wanted, "–", rule, None)
    last = max(rows, key=lambda row: row["context"])
    dense, hybrid = last["dense_ms"], last["hybrid_ms"]
    measured = f"{dense:.2f} → {hybrid:.2f} ms ({dense / hybrid:.1f} ×) at {last['context']}, on {last['backend']}"
    return Verdict(claim, wanted, measured, rule, hybrid < dense)


def _peers(found: Evidence) -> list[Verdict]:
    wanted = {"magicdec": "0.7 … 1.35 × vanilla", "lookup": "0.85 … 2.1 × vanilla"}
    rows = []
    for peer, theirs in wanted.items():
        ratio = speed_up(found.straight("tree"), found.of(peer))
        measured = "–" if ratio is None else f"tree decodes {_times(ratio)} as fast"
        rule = "tokens/s on the same prompts, all contexts: more than 1 ×"
        rows.append(Verdict(f"Faster than {peer}", theirs, measured, rule, ratio["value"] > 1 if ratio else None))
    return rows


def _sampling(found: Evidence) -> Verdict:
    tree = found.straight("tree", 1.0)
    length, ratio = pooled(tree, acceptance), speed_up(tree, found.of("vanilla", 1.0))
    measured = "–" if length is None else f"{shown(length)} tokens a round"
    measured += "" if ratio is None else f", {_times(ratio)} vanilla"
    rule = "the released code is not lossless at T = 1, so its figures are no mark: faster than vanilla"
    faster = ratio["value"] > 1 if ratio else None
    return Verdict("Works at temperature 1", "no comparable figure", measured, rule, faster)


def _lossless(found: Evidence) -> Verdict:
    same = sameness(found.of("tree"), found.of("vanilla"))
    rule = "fp32: vanilla's tokens; in half precision near-ties flip, and the tests in fp32 decide"
    if same is None:
        return Verdict("Lossless", "yes", "–", rule, None)
    measured = (
        f"{same['different']} of {same['outputs']} outputs differ ({same['per_1000_tokens']:.2f} per 1000 tokens)"
    )
    exact = same["different"] == 0
    return Verdict("Lossless", "yes", measured, rule, exact if found.facts["dtype"] == "float32" or exact else None)


def _long(found: Evidence, name: str, tasks: list[str] | None = None, t: float = 0.0) -> list[Sample]:
    """A method's samples at the longest contexts, without loops."""
    return found.straight(name, t, context=found.contexts[-LONGEST:], task=found.tasks if tasks is None else tasks)


def _at_least(claim: str, figure: dict[str, Any] | None, wanted: float) -> Verdict:
    rule = "pooled over tasks and contexts, T = 0"
    return Verdict(claim, f"at least {wanted:.1f}", shown(figure), rule, _reaches(figure, wanted))


def _ratio_at_least(
    claim: str, found: Evidence, name: str, other: str, wanted: float, tasks: list[str] | None = None, t: float = 0.0
) -> Verdict:
    mine, theirs = paired(_long(found, name, tasks, t), found.of(other, t))
    ratio = speed_up(mine, theirs)
    measured = f"{_times(ratio)} ({_pace(mine)}; {other} {_pace(theirs)}; {len(mine)} outputs)" if ratio else "–"
    rule = f"the {LONGEST} longest contexts, same prompts, T = {t:g}"
    return Verdict(claim, f"at least {wanted:.1f} ×", measured, rule, _reaches(ratio, wanted))


def _reaches(figure: dict[str, Any] | None, least: float) -> bool | None:
    return None if figure is None else figure["value"] >= least


def _times(ratio: dict[str, Any] | None) -> str:
    return "–" if ratio is None else f"{shown(ratio)} ×"


def _pace(samples: list[Sample]) -> str:
    length, time = acceptance(samples), round_ms(samples)
    return "–" if length is None or time is None else f"{length:.2f} tokens in {time:.2f} ms"


def _over_best(claim: str, found: Evidence, name: str) -> Verdict:
    rule = f"least ratio over dynamic and static cache, each measured task at the {LONGEST} longest contexts, T = 0"
    ratios = [
        (ratio, baseline, context)
        for baseline in UNASSISTED
        for (_, context), ratio in speed_up_by_cell(_long(found, name), found.of(baseline)).items()
    ]
    if {baseline for _, baseline, _ in ratios} != set(UNASSISTED):
        return Verdict(claim, "at least 5.0 ×", "–", rule, None)
    least, baseline, context = min(ratios)
    return Verdict(claim, "at least 5.0 ×", f"{least:.2f} × ({baseline} at {context})", rule, least >= 5)


def _round_time(found: Evidence, name: str) -> Verdict:
    """On the prompts that both temperatures have."""
    warm, cold = (round_ms(samples) for samples in paired(found.of(name, 1.0), found.of("tree")))
    claim = f"Time of a round at T = 1 against T = 0, {name}"
    if warm is None or cold is None:
        return Verdict(claim, "within 5%", "–", "same prompts", None)
    measured = f"{warm / cold - 1:+.1%} ({cold:.2f} → {warm:.2f} ms)"
    return Verdict(claim, "within 5%", measured, "same prompts", warm / cold <= ROUND_TIME_MARGIN)


def _reach_of_descend(found: Evidence) -> list[Verdict]:
    """Acceptance at T = 1 of both rules, beside what the target's own draws can reach of the most probable tree."""
    known = [row for row in found.forced.get("sampled", {}).values() if row]
    rounds = sum(row["rounds"] for row in known)
    by_depth = [sum(column) / rounds for column in zip(*(row["probability_by_depth"] for row in known), strict=True)]
    expected = 1 + sum(by_depth) if rounds else None
    beside = "–" if expected is None else f"1 + Σ p = {expected:.2f}; Σ p(children of the root) = {by_depth[0]:.2f}"
    descend, reject = (pooled(found.of(name, 1.0), acceptance) for name in ("tree-descend", "tree"))
    margin = None
    if descend is not None and expected is not None and descend["error"]:
        margin = abs(descend["value"] - expected) <= 4 * descend["error"]
    return [
        Verdict(
            "Acceptance length at T = 1, rule descend, beside its expectation",
            beside,
            shown(descend),
            "Σ p over the tree's paths bounds this rule's mean: within 4 standard errors of it",
            margin,
        ),
        Verdict(
            "Acceptance length at T = 1, rule reject (the default)",
            "above descend's",
            shown(reject),
            "its tree is sampled, so that Σ p does not bound it",
            None if descend is None else _reaches(reject, descend["value"]),
        ),
    ]
