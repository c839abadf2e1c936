"""The four tasks."""

from longspec.inference.tasks import TASKS, Task

TEMPLATES = {name: TASKS[name] for name in ("lcc", "repobench-p", "qmsum")} | {
    "gsm8k": Task("{context}Question: {input}\nAnswer:", ("context", "input"), 256)
}
"""Every task's prompt. Worked solutions are no task of LongBench's, so only the experiment knows them."""
