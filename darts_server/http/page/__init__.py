"""``/darts/``: the built-in page, one document that loads nothing else."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse

PARTS = Path(__file__).parent
MARK = re.compile(r"/\* (\w+\.(?:css|js)) \*/")
"""Place of a part in the document."""
INLINE = re.compile(r"<(script|style)[^>]*>(.*?)</\1>", re.DOTALL)


@cache
def document() -> str:
    """Return the page with all its parts."""
    whole = (PARTS / "page.html").read_text("utf-8")
    return MARK.sub(lambda mark: (PARTS / mark[1]).read_text("utf-8"), whole)


@cache
def content_policy() -> str:
    """Allow only the document's own scripts and styles, and only requests to this server."""
    digests: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in INLINE.findall(document()):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        digests[kind].append(f"'sha256-{digest}'")
    return (
        f"default-src 'none'; script-src {' '.join(digests['script'])}; style-src {' '.join(digests['style'])}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def routes() -> APIRouter:
    """Create the routes. They need no key: the page asks its user for one, and sends it with its requests."""
    api = APIRouter()

    @api.get("/darts/", include_in_schema=False)
    async def page() -> Response:
        """The built-in page."""
        headers = {
            "Content-Security-Policy": content_policy(),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-cache",
        }
        return Response(document(), media_type="text/html", headers=headers)

    @api.get("/darts", include_in_schema=False)
    async def slashless() -> Response:
        """Redirect to the page; relative, so that it works behind a proxy that adds a path prefix."""
        return RedirectResponse("darts/")

    return api
