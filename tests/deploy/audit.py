"""Check the installed packages for known vulnerabilities.

Reports how many packages no service lists, so that no answer is not taken for a good one. Arguments go
to ``pip-audit``, such as ``--ignore-vuln ID``.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

COMMAND = (sys.executable, "-m", "pip_audit", "--format", "json", "--skip-editable", "--progress-spinner", "off")
SECONDS = "5"
"""Timeout for the answer about one package."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = sys.argv[1:] if arguments is None else arguments
    done = subprocess.run([*COMMAND, "--timeout", SECONDS, *options], capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        print(f"audit: not made, {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")
        return 0
    lines, found = summarize(packages)
    print(*lines, sep="\n")
    return 1 if found else 0


def summarize(packages: Sequence[Mapping[str, Any]]) -> tuple[list[str], bool]:
    """Summarize packages as ``pip-audit`` lists them; also return whether one is vulnerable."""
    listed = [package for package in packages if "skip_reason" not in package]
    lines = [
        f"audit: {package['name']} {package['version']}: {vulnerability['id']}, {_remedy(vulnerability)}"
        for package in listed
        for vulnerability in package["vulns"]
    ]
    if not listed:
        return [f"audit: not made, no service lists any of the {len(packages)} packages"], False
    summary = f"audit: {len(listed)} of {len(packages)} packages looked up, {len(lines)} vulnerabilities"
    return [*lines, summary], bool(lines)


def _remedy(vulnerability: Mapping[str, Any]) -> str:
    versions = vulnerability.get("fix_versions") or ()
    return f"fixed in {', '.join(versions)}" if versions else "no fix yet"


if __name__ == "__main__":
    sys.exit(main())
