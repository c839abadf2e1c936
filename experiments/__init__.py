"""An experiment on a real target, from prompts to a report: `python -m experiments STEP --config FILE`."""
