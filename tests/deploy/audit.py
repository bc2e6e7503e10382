"""Looks the installed packages up among known vulnerabilities, where a service that lists them can be reached.

What could not be looked up is said: that nothing was found means nothing where nobody was asked. Arguments go to
``pip-audit``, such as ``--ignore-vuln ID``.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

COMMAND = (sys.executable, "-m", "pip_audit", "--format", "json", "--skip-editable", "--progress-spinner", "off")
SECONDS = "5"
"""For an answer about one package."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = sys.argv[1:] if arguments is None else arguments
    done = subprocess.run([*COMMAND, "--timeout", SECONDS, *options], capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        print(f"audit: not made, {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")
        return 0
    lines, found = told(packages)
    print(*lines, sep="\n")
    return 1 if found else 0


def told(packages: Sequence[Mapping[str, Any]]) -> tuple[list[str], bool]:
    """What is said of packages as ``pip-audit`` lists them, and whether one is vulnerable."""
    asked = [package for package in packages if "skip_reason" not in package]
    lines = [
        f"audit: {package['name']} {package['version']}: {vulnerability['id']}, {_remedy(vulnerability)}"
        for package in asked
        for vulnerability in package["vulns"]
    ]
    if not asked:
        return [f"audit: not made, no service knows any of the {len(packages)} packages"], False
    summary = f"audit: {len(asked)} of {len(packages)} packages looked up, {len(lines)} vulnerabilities"
    return [*lines, summary], bool(lines)


def _remedy(vulnerability: Mapping[str, Any]) -> str:
    versions = vulnerability.get("fix_versions") or ()
    return f"mended in {', '.join(versions)}" if versions else "not mended yet"


if __name__ == "__main__":
    sys.exit(main())
