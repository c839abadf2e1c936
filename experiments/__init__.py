"""An experiment on a real target, from prompts to a report: `python -m experiments STEP --config FILE`."""

import longspec  # noqa: F401  # before torch, so that its threads hardly spin while they wait
