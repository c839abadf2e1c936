"""The chat page: one file without external resources, and the headers that keep it so."""

import base64
import hashlib
import re
from importlib import resources


def load_page() -> tuple[str, dict[str, str]]:
    """The page and its headers. Its policy admits the scripts and the style that the file contains, and no others."""
    folder = resources.files(__package__).joinpath("web")

    def inline(element: str, name: str) -> str:
        return f"<{element}>\n{folder.joinpath(name).read_text(encoding='utf-8')}</{element}>"

    page = folder.joinpath("index.html").read_text(encoding="utf-8")
    page = re.sub(r'<link rel="stylesheet" href="(.*?)">', lambda match: inline("style", match[1]), page)
    page = re.sub(r'<script src="(.*?)"></script>', lambda match: inline("script", match[1]), page)
    # The page shows text that a model wrote. Should such text ever be taken for HTML, no script of it would run.
    policy = (
        f"default-src 'none'; script-src {_digests(page, 'script')}; style-src {_digests(page, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return page, headers


def _digests(page: str, element: str) -> str:
    """The CSP sources of the inline elements of this kind."""
    contents = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
    digests = (hashlib.sha256(content.encode()).digest() for content in contents)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
