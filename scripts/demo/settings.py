"""The demo's sizes: the one that is shown, a larger one for a GPU, and one of seconds that tests run."""

from dataclasses import dataclass

from scripts.demo.corpus import CorpusSettings
from scripts.demo.evaluate import EvaluationSettings
from scripts.demo.target import TargetSettings
from scripts.pipeline.stages import StageSettings


@dataclass(frozen=True)
class Required:
    """What the demo must show, beside every method's tokens being vanilla's."""

    tree_acceptance: float = 2.0
    tree_over_seq: float = 0.0
    tree_over_untrained: float = 0.8
    bigram_over_target: float = 0.15
    """Bits per byte."""


@dataclass(frozen=True)
class DemoSettings:
    corpus: CorpusSettings
    target: TargetSettings
    stages: tuple[StageSettings, ...]
    evaluation: EvaluationSettings
    required: Required


def shown(family: str) -> DemoSettings:
    """`make demo`: some ten minutes on two cores."""
    return DemoSettings(
        CorpusSettings(),
        TargetSettings(family),
        (
            StageSettings(1, family, steps=500, learning_rate=3e-3, max_length=256, rows_a_step=4),
            StageSettings(2, family, steps=50, learning_rate=1e-3, max_length=1024, rows_a_step=4),
            StageSettings(3, family, steps=50, learning_rate=1e-3, max_length=1024, rows_a_step=4),
        ),
        EvaluationSettings(family),
        Required(),
    )


def gpu(family: str) -> DemoSettings:
    """A target of 110M parameters, for measurements on a GPU."""
    return DemoSettings(
        CorpusSettings(answers=4000, prompts=48),
        TargetSettings(
            family,
            vocab_size=8192,
            hidden_size=768,
            intermediate_size=2048,
            layers=16,
            kv_heads=4,
            steps=400,
            tokens_a_step=32768,
            matrix_lr=2e-3,
            embedding_lr=4e-3,
        ),
        (
            StageSettings(1, family, steps=200, learning_rate=1e-3, max_length=256, rows_a_step=32),
            StageSettings(2, family, steps=20, learning_rate=3e-4, max_length=1024, rows_a_step=8),
            StageSettings(3, family, steps=20, learning_rate=3e-4, max_length=1024, rows_a_step=8),
        ),
        EvaluationSettings(family, new_tokens=128, row_length=1024),
        Required(),
    )


def tiny(family: str) -> DemoSettings:
    """The same path with models that have learnt next to nothing."""
    return DemoSettings(
        CorpusSettings(context=200, code=300, answer=400, answers=40, prompts=3, largest=400_000),
        TargetSettings(
            family,
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            layers=2,
            positions=3072,
            steps=20,
            tokens_a_step=512,
            short=64,
            long=256,
        ),
        tuple(StageSettings(n, family, steps=4, learning_rate=1e-3, max_length=512, rows_a_step=2) for n in (1, 2, 3)),
        EvaluationSettings(family, new_tokens=8, tree_shape=(2, 3), gamma=2, rows=2, forced_rows=2),
        Required(tree_acceptance=1.0, tree_over_seq=-10.0, tree_over_untrained=-10.0, bigram_over_target=-10.0),
    )


SIZES = {"shown": shown, "gpu": gpu, "tiny": tiny}
