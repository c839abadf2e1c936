"""A process of a step: `python -m longspec.pipeline WORK FOLDER [NAME ...]`, under torchrun one of several."""

import signal
import sys
from pathlib import Path

from longspec.errors import reports_user_errors
from longspec.extras import extra
from longspec.signals import StopSignals, end_with_parent

with extra("demo"):
    from longspec.inference.process_group import shared_target
    from longspec.pipeline.answers import write_share
    from longspec.pipeline.evaluation import measure
    from longspec.pipeline.files import settings_file
    from longspec.pipeline.induction import measure_layers
    from longspec.pipeline.probes import run_probes
    from longspec.pipeline.settings import load_settings
    from longspec.ranks.replicas import joined_replicas

WORK = {work.__name__: work for work in (write_share, measure_layers, run_probes, measure)}


@reports_user_errors
def main() -> None:
    """Do this process's share of some work, with the settings in the folder."""
    # torchrun may be killed before it can end its ranks. One that joins the others handles no signal meanwhile, and a
    # rank loses nothing that it has written.
    end_with_parent(by=signal.SIGKILL)
    work, folder, *names = sys.argv[1:]
    settings = load_settings(settings_file(Path(folder)))
    tp_size = settings.tp_size
    with StopSignals(at_once=True) as stop, shared_target(tp_size, None, stop), joined_replicas(tp_size) as replicas:
        WORK[work](settings, Path(folder), replicas, *names)


if __name__ == "__main__":
    main()
