"""Generate the sync client from the async client.

Builds and ``pip install``, also an editable install, call the hook. In a checkout ``scripts/setup`` runs this file,
because the generated modules are not in git.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path(__file__).parent / "darts_client"

HEADER = "# Generated from {} by clients/hatch_build.py: edit that file instead.\n"
# Patterns and replacements, in this order. They apply to docstrings, too.
RULES = (
    (r"\b(async|await) ", ""),
    (r"\basync(contextmanager)\b", r"\1"),
    (r"\b_async_", "_sync_"),
    (r"\basync_", ""),
    (r"\bAsyncByteStream\b", "SyncByteStream"),
    (r"\b(_?)Async(?=[A-Z])", r"\1"),
    (r"\b(__)?a(?=(enter|exit|iter|next)__|(close|closing|next|read)\b)", r"\1"),
)


def generate(package: Path = PACKAGE) -> None:
    """Write ``_sync_*.py`` for each ``_async_*.py`` if it differs, and delete generated files without a source."""
    sources = {path.with_name(path.name.replace("async", "sync")): path for path in package.glob("_async_*.py")}
    for orphan in set(package.glob("_sync_*.py")) - set(sources):
        orphan.unlink()
    for target, source in sources.items():
        code = source.read_text()
        for pattern, replacement in RULES:
            code = re.sub(pattern, replacement, code)
        code = HEADER.format(source.name) + code
        if not target.exists() or target.read_text() != code:
            target.write_text(code)


class GenerateSyncClient(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate()


if __name__ == "__main__":
    generate()
