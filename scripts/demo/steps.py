"""Steps that are run once: each has a folder, and a marker in it that says from which settings it came."""

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

MARKER = "done.json"


class Steps:
    """A chain of steps below one folder; a step is run again if its settings or a step before it changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seconds: dict[str, float] = {}
        self.before = ""
        """Identifies the result of the last step."""

    def run(self, name: str, settings: Any, work: Callable[[Path], None]) -> Path:
        """The folder of step `name`, filled by `work(folder)` unless it is complete already.

        settings: a dataclass instance. What an earlier, different or unfinished run left there is removed.
        """
        folder = self.root / name
        described = json.dumps([self.before, name, asdict(settings)], sort_keys=True)
        key = hashlib.sha256(described.encode()).hexdigest()
        marker = _read(folder / MARKER)
        if marker.get("key") == key:
            print(f"{name:<10} done before", flush=True)
        else:
            print(f"{name:<10} …", end=" ", flush=True)
            marker = _run_afresh(folder, key, work)
            print(f"{marker['seconds']:.0f} s", flush=True)
        self.seconds[name] = marker["seconds"]
        self.before = marker["result"]
        return folder


def _run_afresh(folder: Path, key: str, work: Callable[[Path], None]) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = time.perf_counter()
    work(folder)
    marker = {"key": key, "result": uuid.uuid4().hex, "seconds": time.perf_counter() - start}
    write_json(folder / MARKER, marker)
    return marker


def _read(marker: Path) -> dict[str, Any]:
    return json.loads(marker.read_text()) if marker.is_file() else {}


def write_json(path: Path, value: Any) -> None:
    """Write `value`, whole or not at all."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
