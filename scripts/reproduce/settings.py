"""The presets: a quarter of an hour on an H200, an hour on 24 GB, a small one on a CPU, seconds for tests.

Arithmetic of h200, a target of 176M parameters (32 layers, 768 wide, 12 query and 4 KV heads of 64), one H200:

    FLOPs of a token in training    6 · 176M = 1.06 G, and attention, recomputed in backward, 7 · 32 · 768 · T =
                                    0.35 G at T = 2048, 2.9 G at 16896
    measured                        220k and 230k tokens/s at T = 2048 on two hosts, 98k at 16896: in 175 and 184 s
                                    (of 210, 15 are for saving, the rest went to starting) 30M and 34M tokens,
                                    299 and 346 steps of 99k
    Muon's Newton-Schulz            3.1 TFLOP a step, against 140 of the step's tokens; some 130 launches, as matrices
                                    of one shape go together (one by one they are 4000, 30 to 40 ms of a step)
    two micro-batches a step        a third would leave fewer steps, and save only what Muon costs no more
    logits                          8192 tokens · 16384 · (2 + 4) bytes = 0.8 GB at a time, not 5 GB for 50k tokens

How long the target learns decides what its draft can follow (docs/reproduce.md, What limits these drafts).

Drafts. A step of stage 1 (16 rows of 1024 tokens) takes 30 to 33 ms, of stage 2 (a row of 16896) 60 ms, of stage 3
(two prompts of 2k to 16k, of whose tokens those of the answers count, 600) 100 to 180 ms.

One stage at a time trains, while the next one, of the other variant, loads; its limit counts from its first step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from scripts.pipeline.stages import StageSettings
from scripts.reproduce.cells import Measurement
from scripts.reproduce.code_files import HoldOut
from scripts.reproduce.corpus import CorpusSettings, TaskSettings
from scripts.reproduce.generated import GenerationSettings
from scripts.reproduce.plan import CPU_PLAN, EvaluationSettings
from scripts.reproduce.target import TargetSettings
from scripts.reproduce.tokens import TokenSettings

MEGA = 1_000_000
COMPARED_SHARE = 0.4
"""Of a stage's steps and time. The draft that is evaluated has most of what there is: more steps help it most."""
TINY_PLAN = (Measurement("vanilla", prompts=1), Measurement("tree", prompts=1))


@dataclass(frozen=True)
class Settings:
    """One preset with one family."""

    corpus: CorpusSettings
    tasks: TaskSettings
    target: TargetSettings
    stages: tuple[StageSettings, ...]
    """Of the draft that is evaluated."""
    generation: GenerationSettings
    evaluation: EvaluationSettings

    @property
    def tokens(self) -> TokenSettings:
        return TokenSettings(self.target.vocab_size)

    @property
    def compared_stages(self) -> tuple[StageSettings, ...]:
        """Of drafts that are compared with each other: the second variant's, and those of the ablations' arms."""
        return tuple(shorter(stage, COMPARED_SHARE) for stage in self.stages)


def shorter(stage: StageSettings, share: float) -> StageSettings:
    steps = max(1, round(share * stage.steps))
    overrides = {**stage.overrides, **stops(stage.number, steps)}
    return replace(stage, steps=steps, limit_s=stage.limit_s and share * stage.limit_s, overrides=overrides)


def stops(number: int, steps: int) -> dict[str, object]:
    """Five checkpoints in a stage; in stage 2 ten times the loss on held-out long documents."""
    found: dict[str, object] = {"save_steps": max(1, steps // 5)}
    return found | ({"evaluation.steps": max(1, steps // 10)} if number == 2 else {})


def h200(family: str, text: str | None) -> Settings:
    """Target 4 minutes, stages 5, evaluation 6; the corpus is made on the CPU before that, in one."""
    target = TargetSettings(
        family,
        vocab_size=16384,
        hidden_size=768,
        intermediate_size=1536,
        layers=32,
        kv_heads=4,
        limit_s=210.0,
        positions=32768,
        rope_theta=500_000.0,
    )
    contexts, answer = (2048, 4096, 8192, 16384), 512
    return Settings(
        CorpusSettings(
            family,
            text,
            target.vocab_size,
            target.positions,
            contexts,
            answer,
            answers=100,
            draft_answers=12,
            hold_out=HoldOut(packages=6),
            installed=True,
            largest=450 * MEGA,
            text_repeats=4,
            tokenizer_characters=50 * MEGA,
            draft_characters=250 * MEGA,
            long_characters=36 * MEGA,
        ),
        TaskSettings(prompts_per_cell=21),
        target,
        stages(family, answer + contexts[-1], steps=(4000, 400, 70), limits=(140.0, 34.0, 16.0)),
        GenerationSettings(texts=4096, prompt=64, new_tokens=960, batch=256),
        EvaluationSettings(limit_s=315.0, contexts=contexts),
    )


def gb24(family: str, text: str | None) -> Settings:
    """The same on a GPU of 24 GB with about a third of the speed: less in memory at a time, three times as long."""
    base = h200(family, text)
    return replace(
        base,
        target=replace(base.target, limit_s=3 * base.target.limit_s, micro_batch=16_896, accumulation=6),
        stages=tuple(
            replace(stage, accumulation=parts, limit_s=3 * (stage.limit_s or 0))
            for stage, parts in zip(base.stages, (4, 1, 2), strict=True)
        ),
        generation=replace(base.generation, batch=64),
        evaluation=replace(base.evaluation, limit_s=900.0),
    )


def stages(
    family: str, window: int, steps: tuple[int, int, int], limits: tuple[float, float, float]
) -> tuple[StageSettings, ...]:
    """The curriculum on a GPU: short text, long documents, prompts with answers."""
    given = [
        stage(1, family, steps[0], 2e-3, 1024, rows_a_step=16, accumulation=1, limit_s=limits[0], max_offset=15_000),
        stage(2, family, steps[1], 1e-3, window, rows_a_step=1, accumulation=1, limit_s=limits[1], max_offset=15_000),
        stage(3, family, steps[2], 2e-4, window, rows_a_step=2, accumulation=2, limit_s=limits[2], max_offset=15_000),
    ]
    return tuple(replace(stage, overrides={**stage.overrides, "optimizer": "muon"}) for stage in given)


def stage(
    number: int,
    family: str,
    steps: int,
    learning_rate: float,
    max_length: int,
    rows_a_step: int,
    accumulation: int,
    limit_s: float,
    max_offset: int,
) -> StageSettings:
    """A stage of the variant sinkpi-slicing, under ZeRO-1, that goes on where it was stopped."""
    overrides = {
        "deepspeed": "zero1",
        "resume": "latest",
        "variant.max_offset": max_offset,
        "data.overflow": "split" if number == 1 else "truncate",
        **stops(number, steps),
    }
    return StageSettings(
        number,
        family,
        steps,
        learning_rate,
        max_length,
        rows_a_step,
        accumulation,
        overrides=overrides,
        limit_s=limit_s,
    )


def cpu(family: str, text: str | None) -> Settings:
    """Real text, but a small target (6 layers, 3M parameters) and contexts of 1k and 2k: 15 minutes on two cores."""
    target = TargetSettings(
        family,
        vocab_size=3072,
        positions=8192,
        limit_s=420.0,
        short=256,
        long=2304,
        long_share=0.4,
        micro_batch=4608,
        accumulation=1,
        warm_up=10,
        held_out_rows=36,
        matrix_lr=3e-3,
        embedding_lr=8e-3,
        momentum=0.9,
    )
    return Settings(
        CorpusSettings(
            family,
            text,
            target.vocab_size,
            target.positions,
            contexts=(1024, 2048),
            answer_tokens=256,
            answers=60,
            draft_answers=30,
            hold_out=HoldOut(packages=4, long_file=8000),
            installed=True,
            largest=12 * MEGA,
            text_repeats=1,
            tokenizer_characters=8 * MEGA,
            draft_characters=3 * MEGA,
            long_characters=2 * MEGA,
        ),
        TaskSettings(prompts_per_cell=4),
        target,
        (
            stage(1, family, 240, 3e-3, 512, rows_a_step=4, accumulation=1, limit_s=110, max_offset=1024),
            stage(2, family, 30, 1e-3, 2304, rows_a_step=4, accumulation=2, limit_s=90, max_offset=1024),
            stage(3, family, 30, 1e-3, 2304, rows_a_step=4, accumulation=2, limit_s=90, max_offset=1024),
        ),
        GenerationSettings(texts=128, prompt=64, new_tokens=448, batch=16),
        EvaluationSettings(
            limit_s=360.0, contexts=(1024, 2048), new_tokens=64, plan=CPU_PLAN, forced_rows=4, forced_tokens=128
        ),
    )


def tiny(family: str, text: str | None) -> Settings:
    """The same path with models that have learnt next to nothing."""
    target = TargetSettings(
        family,
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        layers=2,
        positions=2048,
        limit_s=300.0,
        steps=8,
        short=64,
        long=576,
        micro_batch=576,
        warm_up=2,
        held_out_rows=4,
    )
    return Settings(
        CorpusSettings(
            family,
            text,
            target.vocab_size,
            target.positions,
            contexts=(256, 512),
            answer_tokens=64,
            answers=4,
            draft_answers=2,
            hold_out=HoldOut(packages=0),
            installed=False,
            largest=400_000,
            text_repeats=1,
            tokenizer_characters=400_000,
            draft_characters=100_000,
            long_characters=100_000,
        ),
        TaskSettings(prompts_per_cell=2),
        target,
        tuple(
            stage(number, family, 2, 1e-3, length, rows_a_step=2, accumulation=2, limit_s=200, max_offset=64)
            for number, length in ((1, 128), (2, 576), (3, 576))
        ),
        GenerationSettings(texts=4, prompt=16, new_tokens=32, batch=2),
        EvaluationSettings(
            limit_s=60.0, contexts=(256, 512), new_tokens=8, plan=TINY_PLAN, forced_rows=2, forced_tokens=24
        ),
    )


PRESETS: dict[str, Callable[[str, str | None], Settings]] = {"h200": h200, "24gb": gb24, "cpu": cpu, "tiny": tiny}
