"""The work of `experiments.drafts` as jobs, and one job: `python -m experiments.jobs WORK FOLDER ARM SEED`.

Jobs run in processes of their own, several at a time: trainings and teacher-forced measurements share GPUs, and
whatever is timed has a GPU to itself.
"""

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.comparison import (
    Comparison,
    arm_folder,
    baseline_settings,
    baselines_folder,
    decoded_arms,
    find_trained,
    measure_missing,
    read_comparison,
    runs,
    timed_arms,
    train_stages,
    trained_settings,
    with_methods,
)
from longspec.errors import UserError, reports_user_errors
from longspec.pipeline.evaluation import evaluation_folder, missing_samples
from longspec.pipeline.files import settings_file
from longspec.pipeline.processes import LAST_LINES, running
from longspec.pipeline.settings import Settings, load_settings
from longspec.signals import StopSignals

TRAINING, BASELINES, DECODING, FORCED = "training", "baselines", "decoding", "forced"
POLL_S = 0.2


@dataclass(frozen=True)
class Job:
    """Work on an arm, or on the target without a draft, with a seed."""

    work: str
    name: str
    seed: int
    alone: bool = False
    """Whether it has a GPU to itself."""
    after: tuple["Job", ...] = ()
    """Jobs that end before this one starts."""

    def __str__(self) -> str:
        return f"{self.work}-{self.name}-{self.seed}"


def planned_jobs(comparison: Comparison, names: Sequence[str], seeds: Sequence[int]) -> list[Job]:
    """All jobs of some arms in the order in which they start. The first seed comes first, so that a run that is stopped
    early has measured it; jobs that have a GPU to themselves come together, because they wait until one is empty."""
    (first, _), *others = runs(comparison, names, seeds)
    timed = [name for name in names if name in timed_arms(comparison)]
    rest = [name for name in names if name not in timed]
    trained = {name: Job(TRAINING, name, first, alone=True) for name in timed}
    equal = tuple(trained.values())
    trained |= {name: Job(TRAINING, name, first, after=equal if comparison.arms[name].like else ()) for name in rest}
    baselines = Job(BASELINES, "target", first, alone=True)
    decoded = {name: Job(DECODING, name, first, True, (trained[name],)) for name in decoded_arms(comparison, names)}
    jobs = [*equal, baselines, *(job for name, job in decoded.items() if name in timed)]
    jobs += [*(trained[name] for name in rest), *(job for name, job in decoded.items() if name in rest)]
    # After the arm's decoding, whose samples are in the same file.
    jobs += [Job(FORCED, name, first, after=(baselines, decoded.get(name, trained[name]))) for name in names]
    for seed, own in others:
        trained = {name: Job(TRAINING, name, seed, after=(baselines, *decoded.values())) for name in own}
        jobs += [*trained.values(), *(Job(FORCED, name, seed, after=(trained[name],)) for name in own)]
    return jobs


def job_settings(job: Job, settings: Settings, comparison: Comparison, root: Path) -> tuple[Settings, Path]:
    """The settings and the folder of a job. Raises UserError for one that lacks the result of another job."""
    if job.work == TRAINING:
        own = trained_settings(settings, comparison, root, job.name, job.seed)
        return own, arm_folder(root, job.name, job.seed)
    if job.work == BASELINES:
        return baseline_settings(settings, comparison), baselines_folder(root)
    if (trained := find_trained(settings, comparison, root, job.name, job.seed)) is None:
        raise UserError(f"{job}: {job.name} is not trained with seed {job.seed}; see the log of the training")
    methods = comparison.decoding if job.work == DECODING else comparison.forced
    return with_methods(trained, methods), arm_folder(root, job.name, job.seed)


def is_done(job: Job, settings: Settings, comparison: Comparison, root: Path) -> bool:
    """Whether a job has nothing left to do. Raises OtherSettings for results of other settings."""
    if job.work == TRAINING:
        if (trained := find_trained(settings, comparison, root, job.name, job.seed)) is None:
            return False
        train_stages(trained, root, arm_folder(root, job.name, job.seed))  # compares the settings
        return True
    try:
        own, folder = job_settings(job, settings, comparison, root)
    except UserError:
        return False
    return evaluation_folder(folder).exists() and not missing_samples(own, folder)


def next_start(
    waiting: Sequence[Job], ended: Set[Job], free: Mapping[str, int], per_gpu: int
) -> tuple[Job, str, int] | None:
    """The first job that waits for no other one, its GPU, and the slots that it takes of those that are `free` on each
    GPU; None if there is no such job, or no room for it: no later one overtakes it."""
    job = next((job for job in waiting if ended >= set(job.after)), None)
    if job is None:
        return None
    slots, gpu = per_gpu if job.alone else 1, max(free, key=free.__getitem__)
    return (job, gpu, slots) if slots <= free[gpu] else None


def run_jobs(
    jobs: Sequence[Job], done: Set[Job], root: Path, per_gpu: int, after_each: Callable[[], object]
) -> list[Job]:
    """Run the jobs that are not `done`, as many at a time as GPUs have room for, and return those that failed.
    after_each: called when jobs have ended and others have started."""
    free, waiting, ended = dict.fromkeys(gpu_names(), per_gpu), [job for job in jobs if job not in done], set(done)
    started: list[_Started] = []
    failed: list[Job] = []
    with ExitStack() as stack:
        try:
            while waiting or started:
                over = [one for one in started if one.process.poll() is not None]
                for one in over:
                    started.remove(one)
                    free[one.gpu] += one.slots
                    ended.add(one.job)
                    failed += [] if one.report() else [one.job]
                while found := next_start(waiting, ended, free, per_gpu):
                    job, gpu, slots = found
                    waiting.remove(job)
                    free[gpu] -= slots
                    started.append(_Started.start(job, root, gpu, slots, stack))
                if over:
                    try:
                        after_each()
                    except Exception:  # the jobs are worth more than a page that is written again
                        traceback.print_exc()
                time.sleep(POLL_S)
        except BaseException:
            for one in started:
                one.process.terminate()  # all at once, before the stack waits for each
            raise
    return failed


@dataclass
class _Started:
    """A job's process."""

    job: Job
    gpu: str
    slots: int
    process: subprocess.Popen
    log: Path
    began: float

    @classmethod
    def start(cls, job: Job, root: Path, gpu: str, slots: int, stack: ExitStack) -> "_Started":
        log = root / "logs" / f"{job}.txt"
        log.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "experiments.jobs", job.work, str(root), job.name, str(job.seed)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
        output = stack.enter_context(log.open("a"))
        child = stack.enter_context(running(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
        print(f"{job}: started" + (f" on GPU {gpu}" if gpu else ""), flush=True)
        return cls(job, gpu, slots, child, log, time.perf_counter())

    def report(self) -> bool:
        """Say how the job ended. Returns whether it succeeded."""
        seconds, code = time.perf_counter() - self.began, self.process.returncode
        if code:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-LAST_LINES:])
            print(f"{self.job}: ended with code {code}; the last lines of {self.log}:\n{tail}", flush=True)
        else:
            print(f"{self.job}: done in {seconds:.0f} s", flush=True)
        return code == 0


def gpu_names() -> list[str]:
    """The GPUs as CUDA_VISIBLE_DEVICES names them; [""] on a CPU."""
    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return names.split(",")[:count] or [""]


@reports_user_errors
def main() -> None:
    """Do a job with the settings in the folder."""
    work, folder, name, seed = sys.argv[1:]
    root = Path(folder)
    settings = load_settings(settings_file(root))
    comparison = read_comparison(settings)
    with StopSignals(at_once=True):
        own, folder_of_job = job_settings(Job(work, name, int(seed)), settings, comparison, root)
        do = train_stages if work == TRAINING else measure_missing
        do(own, root, folder_of_job)


if __name__ == "__main__":
    main()
