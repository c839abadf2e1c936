"""The notice about work that is done at the first use on a machine and kept for later ones."""

import logging
from functools import cache

logger = logging.getLogger(__name__)


@cache
def announce_first_use() -> None:
    """Log the notice, once per process. Called before kernels are compiled or rounds are measured."""
    logger.warning("first use: kernels are compiled and rounds measured, which takes some seconds and is kept")
