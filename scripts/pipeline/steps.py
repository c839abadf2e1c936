"""Steps that are run once: each has a folder, and a marker in it that says from which settings it came."""

import hashlib
import json
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.pipeline.files import write_json

MARKER = "done.json"
STARTED = "started.json"
"""Beside what a step that can go on has left so far: which step that was."""


class Steps:
    """A chain of steps below one folder; a step is run again if its settings or a step before it changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seconds: dict[str, float] = {}
        self.before = ""
        """Identifies the result of the last step."""

    def branch(self) -> "Steps":
        """A chain of its own that goes on from here."""
        other = Steps(self.root)
        other.seconds, other.before = self.seconds, self.before
        return other

    def run(self, name: str, settings: Any, work: Callable[[Path], None], resumable: bool = False) -> Path:
        """The folder of step `name`, filled by `work(folder)` unless it is complete already.

        settings: a dataclass instance. What an earlier or different run left there is removed; what an unfinished run
        of the same step left, too, unless `work` is `resumable` and goes on from it.
        """
        folder = self.root / name
        described = json.dumps([self.before, name, asdict(settings)], sort_keys=True)
        key = hashlib.sha256(described.encode()).hexdigest()
        marker = _read(folder / MARKER)
        if marker.get("key") == key:
            print(f"{name:<10} done before", flush=True)
        else:
            print(f"{name:<10} …", flush=True)
            marker = _run(folder, key, work, resumable)
            print(f"{name:<10} {marker['seconds']:.0f} s", flush=True)
        self.seconds[name] = marker["seconds"]
        self.before = marker["result"]
        return folder


def _run(folder: Path, key: str, work: Callable[[Path], None], resumable: bool) -> dict[str, Any]:
    if not (resumable and _read(folder / STARTED).get("key") == key):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if resumable:
            write_json(folder / STARTED, {"key": key})
    start = time.perf_counter()
    work(folder)
    marker = {"key": key, "result": uuid.uuid4().hex, "seconds": time.perf_counter() - start}
    write_json(folder / MARKER, marker)
    return marker


def _read(marker: Path) -> dict[str, Any]:
    return json.loads(marker.read_text()) if marker.is_file() else {}
