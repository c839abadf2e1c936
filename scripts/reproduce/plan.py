"""How much of what an evaluation measures, and in which order.

On one H200, for a target of 32 layers and with two prompts for each of transformers' modes, it took 326 s with 14
prompts of the tree at temperature 0: calls of our own `generate` 106 s, transformers' 47 s; the rest are warm-ups,
kernels compiled at first sight, the search for the best tree, a round's parts and teacher forcing. On a slower host,
with 20 prompts, it took two calls, 377 and 81 s: what comes last in the plan may be cut short where that is more than
there is, and the same command again goes on with it.
"""

from dataclasses import dataclass

from longspec.inference.methods import AUTO
from scripts.reproduce.baselines import BASELINES, STATIC
from scripts.reproduce.cells import Measurement

DESCEND = "tree-descend"
PLAN = (
    Measurement("vanilla", prompts=10, share=12),
    Measurement("tree", prompts=20, share=24),
    Measurement("lookup", prompts=7, share=9),
    Measurement("tree-auto", AUTO, prompts=7, share=10),
    Measurement("tree", temperature=1.0, prompts=3, seeds=3, share=13),
    Measurement(DESCEND, "tree", temperature=1.0, prompts=3, share=5, tree_rule="descend"),
    Measurement("vanilla", temperature=1.0, prompts=2, share=5),
    Measurement("lookup", temperature=1.0, prompts=3, share=4),
    Measurement("seq", prompts=3, share=6),
    Measurement("magicdec", prompts=3, share=8),
    *(
        Measurement(name, prompts=1, share=3, tasks=("lcc",), longest_contexts=2)
        for name in BASELINES
        if name != STATIC
    ),
    # Each context of it is compiled anew, for half a minute or more; another task takes a second.
    Measurement(STATIC, prompts=2, share=8, longest_contexts=1),
    Measurement("seq", temperature=1.0, prompts=1, share=2),
    Measurement("magicdec", temperature=1.0, prompts=1, share=3),
)
"""What matters most comes first: time that runs short is missing at the end."""
CPU_PLAN = (
    Measurement("vanilla", prompts=2, share=4),
    Measurement("tree", prompts=2, share=12),
    Measurement("lookup", prompts=2, share=4),
    Measurement("tree", temperature=1.0, prompts=1, seeds=2, share=14),
    Measurement(DESCEND, "tree", temperature=1.0, prompts=1, share=6, tree_rule="descend"),
    Measurement("vanilla", temperature=1.0, prompts=1, share=2),
    Measurement("seq", prompts=1, share=3),
    Measurement("magicdec", prompts=1, share=5),
    *(Measurement(name, prompts=1, share=3, tasks=("lcc",), longest_contexts=2) for name in BASELINES),
)
"""Of fewer prompts, and without a search for the best tree, which takes minutes on a CPU."""


@dataclass(frozen=True)
class EvaluationSettings:
    limit_s: float = 300.0
    """From where pair and prompts are in memory."""
    variant: str = "sinkpi-slicing"
    stage: int = 3
    tasks: tuple[str, ...] = ("lcc", "repobench-p", "qmsum", "gsm8k")
    """Those without a file are left out."""
    contexts: tuple[int, ...] = (2048, 4096, 8192, 16384)
    new_tokens: int = 64
    """As LongBench has for its code tasks; the longer an output of a small target, the likelier it loops."""
    gamma: int = 4
    """Of seq and magicdec."""
    plan: tuple[Measurement, ...] = PLAN
    rounds: bool = True
    """Whether to measure where a round's time goes, too."""
    forced_s: float = 20.0
    """Of the time: for teacher-forced acceptance, which comes last."""
    forced_rows: int = 8
    """Of held-out text, at each context."""
    forced_tokens: int = 256
    """At the end of each row, that rounds go through."""
