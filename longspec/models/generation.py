"""What `model.generate` calls. The package sets it, because models know nothing of decoding."""

from collections.abc import Callable
from typing import Any

generate: Callable[..., Any]
"""(model, arguments of transformers' `generate`) -> its result"""
