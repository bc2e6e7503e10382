"""``/darts/``: the built-in page, one document that loads nothing else."""

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, RedirectResponse

PARTS = Path(__file__).parent
MARK = re.compile(r"/\* (\w+\.(?:css|js)) \*/")
INLINE = re.compile(r"<(script|style)[^>]*>(.*?)</\1>", re.DOTALL)


def add_routes(api: APIRouter) -> None:
    document = (PARTS / "page.html").read_text("utf-8")
    document = MARK.sub(lambda mark: (PARTS / mark[1]).read_text("utf-8"), document)

    # The policy allows only the document's own scripts and styles, and only requests to this server.
    allowed = {"script": "script-src", "style": "style-src"}
    for tag, text in INLINE.findall(document):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed[tag] += f" 'sha256-{digest}'"
    headers = {
        "Content-Security-Policy": f"default-src 'none'; {'; '.join(allowed.values())}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }

    @api.get("/darts/", include_in_schema=False)
    async def page() -> Response:
        return Response(document, media_type="text/html", headers=headers)

    @api.get("/", include_in_schema=False)
    async def root() -> Response:
        """Redirect a browser to the page, and list the server's pages for other clients."""
        places = {"page": "darts/", "openapi": "openapi.json", "health": "health"}
        return JSONResponse(places, status_code=307, headers={"Location": "darts/"})

    @api.get("/darts", include_in_schema=False)
    async def slashless() -> Response:
        # A relative address works behind a proxy that adds a prefix to the path.
        return RedirectResponse("darts/")
