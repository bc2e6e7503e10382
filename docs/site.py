"""Hooks of mkdocs: add the pages that stand beside docs/ to the site, and translate the links between both folders.

On the repository's web page a link is a path from the file that has it. The site has one folder for all pages, and no
source files.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "index.md": "README.md",
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Pages of the site whose files stand beside docs/, by their place in the site."""
LINK = re.compile(r"\[(?P<text>[^\[\]]*(?:\[[^\]]*\][^\[\]]*)*)\]\((?P<target>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")

log = get_plugin_logger(__name__)  # a warning of this logger fails a strict build


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand beside docs/."""
    for place, name in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Translate the links of one page."""
    source = page.file.src_uri
    folder = ROOT if source in PAGES else ROOT / "docs"

    def translate(link: re.Match[str]) -> str:
        target = link["target"]
        if not target or "://" in target:
            return link[0]
        file = (folder / target).resolve()
        if not file.exists():
            log.warning("%s links to %s, which does not exist", source, target)
        for place, name in PAGES.items():
            if file == ROOT / name:
                return f"[{link['text']}]({place}{link['anchor'] or ''})"
        if file.is_relative_to(ROOT / "docs"):
            return f"[{link['text']}]({file.relative_to(ROOT / 'docs')}{link['anchor'] or ''})"
        # The site has no source files: their path is shown, as it is in the repository.
        return f"{link['text']} (`{file.relative_to(ROOT)}`)"

    return LINK.sub(translate, markdown)
