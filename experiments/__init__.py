"""The paper's claims on a real pair, on top of `longspec draft`: `python -m experiments --config FILE`."""

import longspec  # noqa: F401  # before torch, so that its threads hardly spin while they wait
