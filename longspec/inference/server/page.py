"""The chat page: one file without external resources, and the headers that keep it so."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources


def load_page() -> tuple[str, dict[str, str]]:
    """The page and its headers. Its policy admits the script and the style that the file contains, and no others."""
    page = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # The page shows text that a model wrote. Should such text ever be taken for HTML, no script of it would run.
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_digest(page, 'script')}",
            f"style-src {_digest(page, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return page, headers


def _digest(page: str, element: str) -> str:
    """The CSP source of the one inline element of this kind."""
    (content,) = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
