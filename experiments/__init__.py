"""The experiment on a real pair, from prompts to a report: `python -m experiments STEP --config FILE`."""
